"""Flat segments: neighbouring elements of a parameter group's shard that are updated alike.

Elementwise optimizers (AdamW, SGD, Lion, the weight EMA) do not care which parameter an element belongs to, so
parameter shards with the same settings are joined: one kernel launch updates many parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from echelon.kernels.optim.stochastic_round import ElementIndices
from echelon.layout.placement import LogicalParam, Piece
from echelon.optim.param_shards import ParamShard, ShardRange, build_param_shards
from echelon.optim.update_rule import UpdateRule
from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.parallel_model import ParallelModel

CHUNK_NUMEL = 1 << 20
"""elements at a time, which bounds temporary memory"""
CHUNK_NUMEL_CUDA = 1 << 23
"""on a GPU, where a launch takes longer than a pass over fewer elements"""


@dataclass(frozen=True, eq=False, kw_only=True)
class FlatSegment(ShardRange):
    """Consecutive elements that are updated alike; those with weight decay come first."""

    num_decayed: int
    """the first elements, which have weight decay"""
    indices: ElementIndices
    """of its elements, for random bits"""
    pieces: tuple[Piece, ...] = ()
    """of the parameters, consecutive"""

    @property
    def step(self) -> Tensor | None:
        """The update count, where weights are rounded stochastically."""
        return self.rounding.step if self.rounding else None

    @property
    def kernel_options(self) -> dict[str, Any]:
        """Keyword arguments of the elementwise Triton kernels."""
        return {"weight_decay": self.weight_decay, "num_decayed": self.num_decayed, "indices": self.indices}

    def chunks(self) -> Iterator[tuple[slice, float]]:
        """Yield chunks of the segment, each with its weight decay."""
        numel = CHUNK_NUMEL_CUDA if self.param_group.unsharded_param.is_cuda else CHUNK_NUMEL
        for begin, end, decay in ((0, self.num_decayed, self.weight_decay), (self.num_decayed, self.size, 0.0)):
            for start in range(begin, end, numel):
                yield slice(start, min(start + numel, end)), decay


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
    return FlatSegment(
        param_group=shard.param_group,
        start=shard.start,
        size=shard.size,
        lr_factor=shard.lr_factor,
        weight_decay=shard.weight_decay,
        rounding=shard.rounding,
        num_decayed=shard.size if shard.weight_decay else 0,
        indices=shard.rounding.indices if shard.rounding else ElementIndices(first_index + shard.start),
        pieces=(shard.piece,),
    )


def _merge_segments(a: FlatSegment, b: FlatSegment) -> FlatSegment | None:
    """Join two segments that are neighbours and updated alike; None where they are not."""
    if a.param_group is not b.param_group or a.start + a.size != b.start or a.lr_factor != b.lr_factor:
        return None
    decays_differ = b.num_decayed and (a.num_decayed < a.size or a.weight_decay != b.weight_decay)
    if a.rounding or b.rounding or decays_differ:
        return None
    return replace(a, size=a.size + b.size, num_decayed=a.num_decayed + b.num_decayed, pieces=(*a.pieces, *b.pieces))
