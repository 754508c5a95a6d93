"""Applies an activation checkpointing policy (cost.py lists them) to the layers of a rank.

Under `full`, `every:N`, `sqrt` and `selective` modules are rerun (checkpoint_wrapper.py). Under `ops`, modules that
know how to recompute their output (an attribute `recompute_output`) attach that to it, and the GEMM that reads it saves
nothing. In a layer without such a module torch's selective checkpointing finds the operators.

Dropout masks are functions of their position (rng.py), so a rerun draws the same ones for the same samples. A layer
that draws from torch's generators reruns with their saved states (`RngSnapshot`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from echelon.memory.checkpointing.checkpoint_wrapper import CheckpointSegment, RngSnapshot, recompute_context
from echelon.memory.checkpointing.cost import segment_length
from echelon.memory.checkpointing.saved_inputs import SaveInput, save_as_is
from echelon.models.attention import CoreAttention
from echelon.rng import RandomStream

GEMM_OPS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
"""operators whose outputs `ops` saves, beside all attention operators"""


@dataclass(frozen=True)
class StageLayers:
    """The layers of one pipeline stage of this rank, in the order in which they are called."""

    names: tuple[str, ...]
    in_flight: int = 1
    """maximum number of microbatches between forward and backward"""


@dataclass(kw_only=True)
class CheckpointedLayers:
    """What the layers of this rank do, and their checkpoint segments."""

    forms: dict[str, str] = field(default_factory=dict)
    """what each layer does: none, ops, selective, ops+selective, or full"""
    segment_tails: set[str] = field(default_factory=set)
    """the last layer of each segment, whose output is not recomputed"""
    segments: list[CheckpointSegment] = field(default_factory=list)

    def unwrap(self) -> None:
        """Restore the forwards of the layers."""
        for segment in self.segments:
            for layer in segment.layers:
                layer.module.forward = layer.forward

    def set_before_recompute(self, hook: Callable[[nn.Module], None]) -> None:
        """Set the hook that is called before a layer is recomputed."""
        for segment in self.segments:
            segment.before_recompute = hook


class RecomputePolicy:
    """Applies recomputation to layers of a model.

    `tensor_parallel` and `context_parallel` tell how layers are split; `save_input` saves inputs of segments.
    """

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
        """Apply a policy that is known before the first step to the layers of all stages."""
        kind, layers = recompute.partition(":")[0], CheckpointedLayers()
        for part in stages:
            names = [name for name in part.names if self.is_on_this_stage(name)]
            if kind in ("full", "every", "sqrt"):
                length = segment_length(recompute, layers=len(names), in_flight=part.in_flight)
                for names_in_list in _layer_lists(names):
                    for start in range(0, len(names_in_list), length):
                        self.checkpoint_segment(names_in_list[start : start + length], layers)
            for name in names if kind in ("ops", "selective") else ():
                self.set_form(name, kind, layers)
        return layers

    def is_on_this_stage(self, name: str) -> bool:
        return not isinstance(self.model.get_submodule(name), nn.Identity)  # of another stage

    def set_form(self, name: str, form: str, layers: CheckpointedLayers) -> None:
        """Apply one form of recomputation to one layer."""
        if form == "full":
            self.checkpoint_segment([name], layers)
        if "selective" in form:
            self._checkpoint_cores(name, layers)
        if "ops" in form:
            self._recompute_ops(name)
        layers.forms[name] = form

    def checkpoint_segment(self, names: Sequence[str], layers: CheckpointedLayers) -> None:
        """Checkpoint layers as one segment."""
        segment = CheckpointSegment(self.stream, self.save_input)
        for name in names:
            segment.add(name, self.model.get_submodule(name))
            layers.forms[name] = "full"
        layers.segment_tails.add(names[-1])
        layers.segments.append(segment)

    def available_forms(self, name: str) -> tuple[str, ...]:
        """Return the forms of recomputation that a layer supports."""
        module = self.model.get_submodule(name)
        makes = any(True for _ in recomputing_modules(module))
        ops = ["ops"] if makes or not (self.tensor_parallel or self.context_parallel) else []
        selective = ["selective"] if any(isinstance(part, CoreAttention) for part in module.modules()) else []
        both = ["ops+selective"] if makes and selective else []
        return ("none", *ops, *selective, *both, "full")

    def _checkpoint_cores(self, name: str, layers: CheckpointedLayers) -> None:
        module = self.model.get_submodule(name)
        cores = {f"{name}.{inner}": part for inner, part in module.named_modules() if isinstance(part, CoreAttention)}
        if not cores:
            raise ValueError(
                f"the attention of {name} ({type(module).__name__}) is not an echelon.CoreAttention module, so its "
                "core is unknown (recompute=selective); use recompute=ops or full"
            )
        for core, part in cores.items():
            segment = CheckpointSegment(self.stream)
            segment.add(core, part)
            layers.segments.append(segment)

    def _recompute_ops(self, name: str) -> None:
        module = self.model.get_submodule(name)
        modules = list(recomputing_modules(module))
        for part in modules:
            part.recompute_output = True
        if modules:
            return
        if self.tensor_parallel or self.context_parallel:
            reason = "context-parallel attention works in place, so a layer"
            if self.tensor_parallel:
                reason = "tensor parallelism reduces GEMM outputs in place, so a split layer"
            raise ValueError(
                f"{reason} must recompute its operators itself "
                f"({type(module).__name__} has no module with `recompute_output`); use recompute=full"
            )
        contexts = partial(_selective_contexts, module, self.stream)
        options: Any = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
        module.forward = partial(checkpoint, module.forward, **options)


def recomputing_modules(module: nn.Module) -> Iterator[Any]:
    """Yield the modules that know how to recompute their output."""
    for part in module.modules():
        if isinstance(getattr(part, "remake", None), bool):
            raise ValueError(f"{type(part).__name__} has an attribute `remake`, now `recompute_output`; rename it")
        if isinstance(getattr(part, "recompute_output", None), bool):
            yield part


def _layer_lists(names: Sequence[str]) -> list[list[str]]:
    """Group layers by their module list: a model may compute something between two lists."""
    lists: dict[str, list[str]] = {}
    for name in names:
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    return list(lists.values())


def _selective_contexts(
    module: nn.Module, stream: RandomStream
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a forward and of its rerun; called at each forward."""
    first, second = create_selective_checkpoint_contexts(_save_policy)
    return first, _RecomputeContext(module, stream, second)


def _save_policy(_context: Any, operator: Any, *_args: Any, **_named: Any) -> CheckpointPolicy:
    name = operator.overloadpacket.__name__
    save = name in GEMM_OPS or "attention" in name
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


class _RecomputeContext(AbstractContextManager[None]):
    """The context of a rerun; entered twice where both halves of a split backward need recomputed tensors."""

    def __init__(self, module: nn.Module, stream: RandomStream, inner: AbstractContextManager[Any]):
        self._repeated, self._inner = partial(recompute_context, module, stream, stream.samples, RngSnapshot()), inner

    def __enter__(self) -> None:
        self._outer = self._repeated()
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        self._inner.__exit__(*error)
        return self._outer.__exit__(*error)
