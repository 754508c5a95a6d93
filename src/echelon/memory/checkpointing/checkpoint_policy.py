"""Activation recomputation: what backward needs is computed again instead of kept.

    none         every layer keeps what its backward reads
    full         each layer keeps its input only; one more forward of the layers is executed in backward
    every:N      only every Nth layer keeps its input; N layers are repeated at once
    sqrt         every:N with N the root of the layers that a rank has in flight
    selective    attention's core (scores, softmax, its dropout, values) is repeated, from what the projections made
    ops          outputs of products and of attention are kept; what lies between them is computed again
    budget:NGiB  each layer does one of none, ops, selective and full, so that what is kept fits (budget.py)

Under `full`, `every:N`, `sqrt` and `selective` modules are repeated (repeated.py). Under `ops`, modules that can say
how their output is made again (an attribute `recompute_output`) do so, and the product that reads it keeps nothing of it. In a
layer without such a module torch's selective checkpointing finds the operators.

Masks of dropout are functions of their place (rng.py), so a second forward draws the same ones when it is told the same
samples. What a layer draws from torch's generators by itself it draws from the same states again (drawn.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from echelon.memory.checkpointing.checkpoint_wrapper import CheckpointSegment, recompute_context
from echelon.memory.checkpointing.cost import segment_length
from echelon.memory.checkpointing.rng_snapshot import RngSnapshot
from echelon.memory.checkpointing.saved_inputs import SaveInput, save_as_is
from echelon.models.attention import CoreAttention
from echelon.rng import RandomStream

GEMM_OPS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
"""operators whose outputs are kept under `ops`, beside every kind of attention"""


@dataclass(frozen=True)
class StageLayers:
    """Layers of one stage of this rank, in the order in which they are called."""

    names: tuple[str, ...]
    in_flight: int = 1
    """microbatches that are between forward and backward, at most"""


@dataclass(kw_only=True)
class CheckpointedLayers:
    """What was done to the layers of a model on this rank."""

    forms: dict[str, str] = field(default_factory=dict)
    """what each layer does: none, ops, selective, both (ops+selective), or full"""
    segment_tails: set[str] = field(default_factory=set)
    """of those that are repeated, the last of each segment: what they give is not made again"""
    segments: list[CheckpointSegment] = field(default_factory=list)

    def set_before_recompute(self, hook: Callable[[nn.Module], None]) -> None:
        """What is called before a layer is repeated."""
        for segment in self.segments:
            segment.before_recompute = hook


class RecomputePolicy:
    """How layers of a model are made to recompute. Tensor parallelism has `split` them, context parallelism `spread`
    them; `keep` is how inputs are kept."""

    def __init__(
        self,
        model: nn.Module,
        stream: RandomStream,
        *,
        save_input: SaveInput = save_as_is,
        tensor_parallel: bool = False,
        context_parallel: bool = False,
    ):
        self.model, self.stream, self.save_input = model, stream, save_input
        self.tensor_parallel, self.context_parallel = tensor_parallel, context_parallel

    def apply(self, recompute: str, stages: Iterable[StageLayers]) -> CheckpointedLayers:
        """Of a policy whose choice is known beforehand."""
        kind, done = recompute.partition(":")[0], CheckpointedLayers()
        for part in stages:
            names = [name for name in part.names if self.is_on_this_stage(name)]
            if kind in ("full", "every", "sqrt"):
                length = segment_length(recompute, layers=len(names), in_flight=part.in_flight)
                for run in _layer_lists(names):
                    for start in range(0, len(run), length):
                        self.checkpoint_segment(run[start : start + length], done)
            for name in names if kind in ("ops", "selective") else ():
                self.set_form(name, kind, done)
        return done

    @property
    def saves_input_as_is(self) -> bool:
        """Inputs are kept as they are, and not in another place as well while a layer is repeated."""
        return self.save_input is save_as_is

    def is_on_this_stage(self, name: str) -> bool:
        return not isinstance(self.model.get_submodule(name), nn.Identity)  # of another stage

    def set_form(self, name: str, form: str, layers: CheckpointedLayers) -> None:
        """One layer by itself."""
        if form == "full":
            self.checkpoint_segment([name], layers)
        if "selective" in form:
            self._checkpoint_cores(name, layers)
        if "ops" in form:
            self._recompute_ops(name)
        layers.forms[name] = form

    def checkpoint_segment(self, names: Sequence[str], layers: CheckpointedLayers) -> None:
        """Layers as one segment."""
        segment = CheckpointSegment(self.stream, self.save_input)
        for name in names:
            segment.add(name, self.model.get_submodule(name))
            layers.forms[name] = "full"
        layers.segment_tails.add(names[-1])
        layers.segments.append(segment)

    def available_forms(self, name: str) -> tuple[str, ...]:
        """What a layer can do."""
        module = self.model.get_submodule(name)
        makes = any(True for _ in recomputing_modules(module))
        ops = ["ops"] if makes or not (self.tensor_parallel or self.context_parallel) else []
        selective = ["selective"] if any(isinstance(part, CoreAttention) for part in module.modules()) else []
        both = ["ops+selective"] if makes and selective else []
        return ("none", *ops, *selective, *both, "full")

    def _checkpoint_cores(self, name: str, done: CheckpointedLayers) -> None:
        module = self.model.get_submodule(name)
        cores = {f"{name}.{inner}": part for inner, part in module.named_modules() if isinstance(part, CoreAttention)}
        if not cores:
            raise ValueError(
                f"the attention of {name} ({type(module).__name__}) is not the module echelon.Core, so nobody knows "
                "where its core begins and ends (recompute=selective); use recompute=ops or full"
            )
        for core, part in cores.items():
            segment = CheckpointSegment(self.stream)
            segment.add(core, part)
            done.segments.append(segment)

    def _recompute_ops(self, name: str) -> None:
        module = self.model.get_submodule(name)
        found = list(recomputing_modules(module))
        for part in found:
            part.recompute_output = True
        if found:
            return
        if self.tensor_parallel:
            raise ValueError(
                f"tensor parallelism sums products where they lie, so a layer that is divided must itself say how its "
                f"operators are repeated ({type(module).__name__} has no module with `recompute_output`); use recompute=full"
            )
        if self.context_parallel:
            raise ValueError(
                "attention that reaches other ranks works where its operators' results lie, so a layer must itself say "
                f"how they are repeated ({type(module).__name__} has no module with `recompute_output`); use recompute=full"
            )
        module.forward = partial(
            checkpoint,
            module.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(_selective_contexts, module, self.stream),
        )


def recomputing_modules(module: nn.Module) -> Iterator[Any]:
    """Modules that can say how their output is made again."""
    return (part for part in module.modules() if isinstance(getattr(part, "recompute_output", None), bool))


def _layer_lists(names: Sequence[str]) -> list[list[str]]:
    """Layers of one list each: what is between two lists nobody knows."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return list(found.values())


def _selective_contexts(
    module: nn.Module, stream: RandomStream
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Called at each forward: the contexts of it and of its repetition."""
    first, second = create_selective_checkpoint_contexts(_save_policy)
    return first, _RecomputeContext(module, stream, second)


def _save_policy(_context: Any, operator: Any, *_args: Any, **_named: Any) -> CheckpointPolicy:
    name = operator.overloadpacket.__name__
    kept = name in GEMM_OPS or "attention" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class _RecomputeContext(AbstractContextManager[None]):
    """Around a repetition. There are two of them where backward has two halves that both need what was not kept."""

    def __init__(self, module: nn.Module, stream: RandomStream, inner: AbstractContextManager[Any]):
        self._repeated, self._inner = partial(recompute_context, module, stream, stream.samples, RngSnapshot()), inner

    def __enter__(self) -> None:
        self._outer = self._repeated()
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        self._inner.__exit__(*error)
        return self._outer.__exit__(*error)
