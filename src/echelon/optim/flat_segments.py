"""Flat segments: neighbouring elements of a parameter group's shard that are updated alike.

Elementwise optimizers (AdamW, SGD, Lion, the weight EMA) do not care which parameter an element belongs to, so
parameter shards with the same settings are joined: one kernel launch updates many parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from echelon.kernels import dispatch
from echelon.kernels.optim.stochastic_round import ElementIndices
from echelon.layout.placement import LogicalParam, Piece
from echelon.optim.param_shards import ParamShard, build_param_shards, stored_weights, update_dtype
from echelon.optim.stochastic_rounding import StochasticRounding
from echelon.optim.update_rule import UpdateRule
from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.parallel_model import ParallelModel

CHUNK_NUMEL = 1 << 20
"""elements at a time, which bounds temporary memory"""
CHUNK_NUMEL_CUDA = 1 << 23
"""on a GPU, where a launch takes longer than a pass over fewer elements"""


@dataclass(frozen=True)
class FlatSegment:
    """Consecutive elements of a parameter group's shard that are updated alike; those with weight decay come first."""

    param_group: ParamGroup
    start: int
    """in the group's shard"""
    size: int
    num_decayed: int
    """the first elements, which have weight decay"""
    weight_decay: float
    lr_factor: float
    """multiplies the learning rate"""
    indices: ElementIndices
    """of its elements, for random bits"""
    rounding: StochasticRounding | None = None
    """for bfloat16 elements without master weights, which are then of one parameter"""
    pieces: tuple[Piece, ...] = ()
    """of the parameters, consecutive"""

    @property
    def shard_slice(self) -> slice:
        return slice(self.start, self.start + self.size)

    @property
    def gradient(self) -> Tensor:
        return self.param_group.grad[self.shard_slice]

    @property
    def weights(self) -> tuple[Tensor, Tensor | None]:
        """The stored weights, or their two halves."""
        return stored_weights(self.param_group, self.shard_slice)

    @property
    def step(self) -> Tensor | None:
        """The update count, where weights are rounded stochastically."""
        return self.rounding.step if self.rounding else None

    @property
    def use_triton(self) -> bool:
        return dispatch.use_triton_update(self.param_group.unsharded_param.device, update_dtype(self.param_group))

    def zeros(self, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate an optimizer state with one value per element."""
        dtype = dtype or update_dtype(self.param_group)
        return torch.zeros(self.size, dtype=dtype, device=self.param_group.unsharded_param.device)

    def chunks(self) -> Iterator[tuple[slice, float]]:
        """Yield chunks of the segment, each with its weight decay."""
        numel = CHUNK_NUMEL_CUDA if self.param_group.unsharded_param.is_cuda else CHUNK_NUMEL
        for begin, end, decay in ((0, self.num_decayed, self.weight_decay), (self.num_decayed, self.size, 0.0)):
            for start in range(begin, end, numel):
                yield slice(start, min(start + numel, end)), decay

    def read(self, chunk: slice) -> Tensor:
        """Return the master weights of a chunk, in the dtype of the update."""
        values = self.param_group.master.values(slice(self.start + chunk.start, self.start + chunk.stop))
        return values.to(update_dtype(self.param_group))

    def write(self, chunk: slice, values: Tensor) -> None:
        """Write the master weights of a chunk, rounded stochastically where there are none."""
        rounded = values if self.rounding is None else self.rounding.round_values(values, chunk.start)
        self.param_group.master.set_values(self.start + chunk.start, rounded)


def build_flat_segments(
    parallel: ParallelModel,
    rule: UpdateRule,
    param_groups: Iterable[ParamGroup] | None = None,
    include: Callable[[LogicalParam], bool] = lambda _: True,
    step: Tensor | None = None,
) -> list[FlatSegment]:
    """Return this rank's trainable elements as segments, of all groups and parameters or of some.

    A rank may hold no element (fewer elements than ranks); it still takes part in every collective.
    """
    first_indices = _first_indices(parallel)
    segments: list[FlatSegment] = []
    for shard in build_param_shards(parallel, rule, param_groups, step):
        if not shard.size or not include(shard.param):
            continue
        segment = _segment_of_shard(shard, first_indices[shard.param_group.spec.name])
        if segments and (merged := _merge_segments(segments[-1], segment)):
            segments[-1] = merged
        else:
            segments.append(segment)
    return segments


def _first_indices(parallel: ParallelModel) -> dict[str, int]:
    """Number all elements of the model: the index of the first element of this rank's shard of each group."""
    indices, first = {}, 0
    for group in parallel.sharded_model.param_groups:
        indices[group.spec.name] = first + parallel.placement.shard_index(group.spec) * group.spec.shard_numel
        first += group.spec.numel
    return indices


def _segment_of_shard(shard: ParamShard, first_index: int) -> FlatSegment:
    start = shard.piece.shard_offset
    return FlatSegment(
        param_group=shard.param_group,
        start=start,
        size=shard.size,
        num_decayed=shard.size if shard.weight_decay else 0,
        weight_decay=shard.weight_decay,
        lr_factor=shard.lr_factor,
        indices=shard.rounding.indices if shard.rounding else ElementIndices(first_index + start),
        rounding=shard.rounding,
        pieces=(shard.piece,),
    )


def _merge_segments(a: FlatSegment, b: FlatSegment) -> FlatSegment | None:
    """Join two segments that are neighbours and updated alike; None where they are not."""
    if a.param_group is not b.param_group or a.start + a.size != b.start or a.lr_factor != b.lr_factor:
        return None
    if a.rounding or b.rounding:
        return None
    if b.num_decayed and (a.num_decayed < a.size or a.weight_decay != b.weight_decay):
        return None
    return replace(a, size=a.size + b.size, num_decayed=a.num_decayed + b.num_decayed, pieces=(*a.pieces, *b.pieces))
