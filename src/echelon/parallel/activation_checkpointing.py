"""Transform of activation checkpointing: which layers recompute, and how their inputs are saved until then.

With tp and sp=0 every rank holds the full residual stream between layers. ZeRO-R's partitioned activations save a
slice of it per rank, flat and padded to equal slices, and all-gather the slices before the layer is recomputed;
tp/cost.py counts these all-gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from echelon.memory.checkpointing.checkpoint_policy import RecomputePolicy, StageLayers
from echelon.memory.checkpointing.cost import ineffective_options, partition_numel, segment_length
from echelon.memory.checkpointing.memory_budget import MemoryBudget
from echelon.memory.checkpointing.saved_inputs import InputArena, SavedInput, SaveInput, save_as_is
from echelon.memory.compression import saved_tensor_compression
from echelon.models.layer_lists import layer_names
from echelon.models.pipeline_model import is_within
from echelon.parallel.comm.axis_names import STAGE_RANKS_AXIS
from echelon.parallel.comm.mesh_axis import MeshAxis

if TYPE_CHECKING:
    from echelon.parallel.transform_context import TransformContext


def save_partitioned(axis: MeshAxis, tensor: Tensor) -> SavedInput:
    """Save a slice per rank of a tensor that all ranks of `axis` hold."""
    size, shape = partition_numel(tensor.numel(), axis.size), tensor.shape
    local = tensor.reshape(-1)[axis.index * size : (axis.index + 1) * size]
    saved = tensor.new_zeros(size)
    saved[: len(local)].copy_(local)

    def restore(saved: Tensor) -> Tensor:
        return axis.all_gather(saved).view(-1)[: shape.numel()].view(shape)

    return saved, restore


def apply_checkpointing(context: TransformContext) -> None:
    """Make layers recompute in backward what the layout's `recompute` does not save."""
    layout, options, axes = context.layout, context.options, context.axes
    saved_tensor_compression.check_compatible(options.compress, layout.recompute, layout.offload)
    stages, in_flight = _stage_layers(context)
    policy = RecomputePolicy(
        context.model,
        context.rng_stream,
        save_input=_save_input(context, stages),
        tensor_parallel=layout.tp > 1,
        context_parallel=layout.cp > 1,
    )
    if not layout.recompute.startswith("budget"):
        context.checkpointing = policy.apply(layout.recompute, stages)
        return
    context.checkpointing = MemoryBudget(
        policy,
        layout.recompute,
        stages,
        in_flight,
        all_reduce_max=partial(axes.get_or_add(STAGE_RANKS_AXIS).all_reduce, op="max"),
        all_reduce_sum=axes["pp"].all_reduce,
    )


def _stage_layers(context: TransformContext) -> tuple[list[StageLayers], tuple[tuple[int, ...], ...]]:
    """Return the layers of each stage of this rank, and the microbatches in flight at every moment of peak memory."""
    names, modules = layer_names(context.model), context.stage_modules
    by_stage = modules.by_stage if modules is not None else (names,)
    in_flight = modules.in_flight if modules is not None else ((1,),)
    stages, remaining = [], list(names)
    for stage, counts in zip(by_stage, zip(*in_flight, strict=True), strict=True):
        layers = [name for name in remaining if any(is_within(name, m) or is_within(m, name) for m in stage)]
        remaining = [name for name in remaining if name not in layers]
        stages.append(StageLayers(tuple(layers), max(counts)))
    return stages, in_flight


def _save_input(context: TransformContext, stages: Sequence[StageLayers]) -> SaveInput:
    """Return how inputs of recomputed layers are saved."""
    layout, options = context.layout, context.options
    reasons = ineffective_options(layout)
    for key in ("partition", "arena"):
        if getattr(options, key) and (reason := reasons.get(key)):
            raise ValueError(f"memory.{key} has no effect with {reason}; leave it out")
    save: SaveInput = partial(save_partitioned, context.axes["tp"]) if options.partition else save_as_is
    if not options.arena:
        return save
    lengths = (segment_length(layout.recompute, layers=len(s.names), in_flight=s.in_flight) for s in stages)
    slots = sum(s.in_flight * -(-len(s.names) // length) for s, length in zip(stages, lengths, strict=True))
    return InputArena(slots, save)
