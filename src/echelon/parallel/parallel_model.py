"""`ParallelModel`: a model laid out on this rank, as the engine, the optimizer and checkpoints read it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields

from torch import nn

from echelon import rng
from echelon.layout import Layout
from echelon.layout.placement import Placement
from echelon.memory.checkpointing.checkpoint_policy import CheckpointedLayers
from echelon.memory.compression import cost as compression_cost
from echelon.memory.compression import saved_tensor_compression
from echelon.parallel.comm.mesh_axis import MeshAxes, MeshAxis
from echelon.parallel.cp.context_parallel import ContextParallel
from echelon.parallel.dp.offload_policy import StateOffload
from echelon.parallel.dp.sharded_model import ShardedModel
from echelon.parallel.dp.zero import ShardingPolicy
from echelon.parallel.parallel_options import ParallelOptions
from echelon.parallel.tp.tp_collectives import RegionBoundary
from echelon.parallel.transform_context import TransformContext


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """A model laid out on this rank."""

    model: nn.Module
    layout: Layout
    axes: MeshAxes
    placement: Placement
    sharded_model: ShardedModel
    rng_stream: rng.RandomStream
    policy: ShardingPolicy
    options: ParallelOptions
    token_axis: MeshAxis
    """the axis of ranks with different tokens: losses and token counts are summed over it"""
    offload: StateOffload
    """the parameter groups whose states live off the device"""
    tp_boundary: RegionBoundary | None
    """where tensor-parallel regions begin and end"""
    cp_context: ContextParallel | None
    """how sequences are sharded over cp"""
    has_expert_params: bool
    """some stage has experts that ep, etp or edp ranks divide"""
    checkpointing: CheckpointedLayers
    """what each layer recomputes"""

    @classmethod
    def from_context(cls, context: TransformContext) -> ParallelModel:
        """Return the model that the transforms have built."""
        return cls(**{field.name: getattr(context, field.name) for field in fields(cls)})

    def saved_tensor_context(self) -> AbstractContextManager[object]:
        """Return the context of every forward pass: it compresses saved tensors if the options ask for it."""
        compress = self.options.compress
        return nullcontext() if compress == compression_cost.NONE else saved_tensor_compression.compressed(compress)
