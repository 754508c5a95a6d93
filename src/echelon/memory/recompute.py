"""Activation recomputation: what backward needs is computed again instead of kept.

    none   every layer keeps what its backward reads
    full   each layer keeps its input only; one more forward of the layers is executed in backward

The block's forward is replaced inside the module, so hooks on the module (gathering parameters, entering regions) run
once. Masks of dropout are functions of their place (rng.py), so the second forward draws the same ones when it is told
the same samples. What the first forward counted (BatchNorm's running statistics) the second must not count again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.rng import Stream


def apply(model: nn.Module, names: Sequence[str], stream: Stream) -> None:
    """Makes the named modules recompute."""
    for name in names:
        module: Any = model.get_submodule(name)
        module.forward = partial(
            checkpoint,
            module.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(_contexts, module, stream),
        )


def _contexts(module: nn.Module, stream: Stream) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Called at each forward: the contexts of it and of its repetition."""
    return nullcontext(), _Again(module, stream)


class _Again(AbstractContextManager[None]):
    """Around a repetition. There are two of them where backward has two halves that both need what was not kept."""

    def __init__(self, module: nn.Module, stream: Stream):
        self._repeated = partial(_repeated, module, stream, stream.samples)

    def __enter__(self) -> None:
        self._inside = self._repeated()
        self._inside.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._inside.__exit__(*error)


@contextmanager
def _repeated(module: nn.Module, stream: Stream, samples: Tensor | None) -> Iterator[None]:
    now, stream.samples = stream.samples, samples
    parts: list[Any] = [part for part in module.modules() if _counts(part)]
    counting = [(part, part.momentum, part.num_batches_tracked.clone()) for part in parts]
    for part in parts:
        part.momentum = 0.0
    try:
        yield
    finally:
        stream.samples = now
        for part, momentum, count in counting:
            part.momentum = momentum
            part.num_batches_tracked.copy_(count)


def _counts(module: Any) -> bool:
    """Keeps running statistics, as every BatchNorm does."""
    return isinstance(getattr(module, "num_batches_tracked", None), Tensor)
