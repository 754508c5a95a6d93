"""Activation recomputation: what backward needs is computed again instead of kept.

    none   every layer keeps what its backward reads
    full   each layer keeps its input only; one more forward of the layers is executed in backward
    ops    outputs of products and of attention are kept; what lies between them is computed again

Under `ops`, modules that can say how their output is made again (an attribute `remake`) do so, and the product that
reads it keeps nothing of it. In a layer without such a module torch's selective checkpointing finds the operators.

Under `full`, the block's forward is replaced inside the module, so hooks on the module (gathering parameters, entering
regions) run once. Masks of dropout are functions of their place (rng.py), so the second forward draws the same ones
when it is told the same samples. What the first forward counted (BatchNorm's running statistics) the second must not
count again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from echelon.rng import Stream

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
"""operators whose outputs are kept under `ops`, beside every kind of attention"""


def apply(
    model: nn.Module, names: Sequence[str], stream: Stream, kind: str, *, split: bool = False, spread: bool = False
) -> None:
    """Makes the named modules recompute. Tensor parallelism has `split` them, context parallelism `spread` them."""
    for name in names:
        module: Any = model.get_submodule(name)
        if isinstance(module, nn.Identity):
            continue  # of another stage
        makers: list[Any] = [part for part in module.modules() if getattr(part, "remake", None) is False]
        if kind == "ops" and makers:
            for part in makers:
                part.remake = True
            continue
        if kind == "ops" and split:
            raise ValueError(
                f"tensor parallelism sums products where they lie, so a layer that is divided must itself say how its "
                f"operators are repeated ({type(module).__name__} has no module with `remake`); use recompute=full"
            )
        if kind == "ops" and spread:
            raise ValueError(
                "attention that reaches other ranks works where its operators' results lie, so a layer must itself say "
                f"how they are repeated ({type(module).__name__} has no module with `remake`); use recompute=full"
            )
        module.forward = partial(
            checkpoint,
            module.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(_contexts, module, stream, kind == "ops"),
        )


def _contexts(
    module: nn.Module, stream: Stream, keeps_products: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Called at each forward: the contexts of it and of its repetition."""
    again = _Again(module, stream)
    if not keeps_products:
        return nullcontext(), again
    first, second = create_selective_checkpoint_contexts(_keeps)
    return first, _Both(again, second)


def _keeps(_context: Any, operator: Any, *_args: Any, **_named: Any) -> CheckpointPolicy:
    name = operator.overloadpacket.__name__
    kept = name in PRODUCTS or "attention" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class _Both(AbstractContextManager[None]):
    """One context inside another, as often as they are entered."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]):
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        self.inner.__exit__(*error)
        return self.outer.__exit__(*error)


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
    tallied: list[Any] = [part for part in module.modules() if hasattr(part, "tally")]
    for part in tallied:
        part.counts = False
    try:
        yield
    finally:
        stream.samples = now
        for part in tallied:
            part.counts = True
        for part, momentum, count in counting:
            part.momentum = momentum
            part.num_batches_tracked.copy_(count)


def _counts(module: Any) -> bool:
    """Keeps running statistics, as every BatchNorm does."""
    return isinstance(getattr(module, "num_batches_tracked", None), Tensor)
