"""Where every logical parameter's pieces are, and which rank owns each element.

[Note: from a logical tensor to a rank's shard]

A logical tensor is split twice. Tensor parallelism splits it into boxes; the boxes of a parameter group (a block, say)
lie one after another in a flat buffer, which data parallelism cuts into equal shards:

    logical [6, 4]          tp=2 cuts dim 0         the group's flat buffer, dp=3 shards of equal size
    +---------+  rows 0-2   +---------+   flatten   | q.weight | k.weight | norm |pad|
    |         | ----------> | local   | ----------> |  shard 0   |  shard 1   |  shard 2  |
    +---------+  (padded)   +---------+

So a rank's piece of a parameter is an interval [start, stop) of the row-major local tensor, whose elements lie in a
box of the logical one. Norm, clip, checkpoint, verify and tied weights read nothing but this record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

Coordinates = Mapping[str, int]

TP_AXES = ("tp", "z", "y", "x")
"""axes that decide which rank owns a piece; shards and stages hold different elements, replicas the same"""
FP32_BYTES = 4
"""bytes of an element of a parameter that stays float32"""
FP32_GROUP = "(float32)"
"""the name of the group of parameters that stay float32, experts apart"""
FROZEN_SUFFIX = " (frozen)"
"""what the name of a group of frozen parameters has after that of its module"""


@dataclass(frozen=True, kw_only=True)
class DimSplit:
    """One dimension of a tensor split over one mesh axis; a second split of it splits the parts of the first."""

    axis: str
    """the mesh axis whose coordinate picks the part"""
    dim: int
    """the tensor dimension that is split"""
    num_parts: int
    """number of different parts; a size that does not divide is padded at the end"""
    num_copies: int = 1
    """neighbouring ranks of the axis that hold the same part (replicated key-value heads)"""


@dataclass(frozen=True, kw_only=True)
class LogicalParam:
    """One logical parameter: its names, its shape, and how it is split."""

    name: str
    """the first of its names in the model; disk and reports use this one"""
    names: tuple[str, ...]
    """every name it has: tied weights have several"""
    shape: tuple[int, ...]
    """the shape on one device"""
    splits: tuple[DimSplit, ...] = ()
    """the dimensions that are split; none: replicated on every rank"""
    tied_pp_ranks: tuple[int, ...] = ()
    """the pp ranks that hold a tied weight, if several do; the first of them counts it in norms"""
    partial_grad_axes: tuple[str, ...] = ()
    """axes over which each rank's gradient is a partial sum, all-reduced once a step (parallel/tp/cost.py)"""
    decay: bool = True
    """weight decay applies (matrices, not vectors)"""
    trainable: bool = True
    """it requires a gradient"""
    is_expert: bool = False
    """it is an expert's: split over ep and etp, replicated over edp"""
    is_conv: bool = False
    """it is a convolution's: as a matrix it has one row per output channel"""
    keep_fp32: bool = False
    """it stays float32 under a 16-bit compute dtype"""

    @property
    def local_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        for cut in self.splits:
            shape[cut.dim] = -(-shape[cut.dim] // cut.num_parts)
        return tuple(shape)

    @cached_property
    def local_numel(self) -> int:
        return math.prod(self.local_shape)

    def box(self, coordinates: Coordinates) -> tuple[tuple[int, int], ...]:
        """Return the half-open range of each logical dimension; shorter than a padded `local_shape`."""
        ranges = [(0, size) for size in self.shape]
        widths = list(self.shape)
        for cut in self.splits:
            (low, high), part = ranges[cut.dim], coordinates[cut.axis] // cut.num_copies
            widths[cut.dim] = width = -(-widths[cut.dim] // cut.num_parts)
            ranges[cut.dim] = (min(low + part * width, high), min(low + (part + 1) * width, high))
        return tuple(ranges)


@dataclass(frozen=True, kw_only=True)
class ParamGroupSpec:
    """Parameters that are gathered, reduced and freed together, one after another in a flat buffer."""

    name: str
    """the module's name; the root group's is empty. Of a group of frozen parameters with FROZEN_SUFFIX"""
    params: tuple[LogicalParam, ...]
    """in the order of the buffer: decayed, not decayed; all of them trainable, or all frozen"""
    num_shards: int
    """equal shards of the buffer; 1: unsharded"""
    stays_unsharded: bool = False
    """once gathered, it stays unsharded until its gradients are computed, as the root group does"""
    offsets: dict[str, int] = field(init=False, repr=False, compare=False)
    """where each parameter starts in the buffer"""

    def __post_init__(self) -> None:
        assert len({param.trainable for param in self.params}) == 1, self.name
        order = sorted(self.params, key=lambda param: not param.decay)
        object.__setattr__(self, "params", tuple(order))
        offsets, position = {}, 0
        for param in order:
            offsets[param.name] = position
            position += param.local_numel
        object.__setattr__(self, "offsets", offsets)

    @property
    def module(self) -> str:
        """The name of the module that holds the parameters."""
        return self.name.removesuffix(FROZEN_SUFFIX)

    @property
    def trainable(self) -> bool:
        """The group's parameters require gradients. A frozen group has parameters and nothing else."""
        return self.params[0].trainable

    @property
    def is_expert(self) -> bool:
        """The group's parameters are experts'."""
        return self.params[0].is_expert

    @property
    def keep_fp32(self) -> bool:
        """The group's parameters stay float32."""
        return self.params[0].keep_fp32

    def element_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes of an element, given those of other groups."""
        return max(dtype_bytes, FP32_BYTES) if self.keep_fp32 else dtype_bytes

    @cached_property
    def numel(self) -> int:
        """Elements of the buffer before padding to equal shards."""
        return sum(param.local_numel for param in self.params)

    @property
    def shard_numel(self) -> int:
        return -(-self.numel // self.num_shards)

    def shard_interval(self, param: LogicalParam, shard: int) -> tuple[int, int]:
        """Return the part [start, stop) of a parameter's local tensor that lies in a shard; empty if start == stop."""
        offset, size = self.offsets[param.name], self.shard_numel
        start = min(max(shard * size - offset, 0), param.local_numel)
        stop = min(max((shard + 1) * size - offset, 0), param.local_numel)
        return start, stop


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The elements of one logical parameter that one rank holds."""

    param: LogicalParam
    group_name: str
    box: tuple[tuple[int, int], ...]
    """the part of the logical tensor that the rank's local tensor covers"""
    start: int
    """first element held, in the row-major local tensor"""
    stop: int
    """one past the last element held"""
    shard_offset: int
    """where element `start` lies in the rank's shard of the group"""
    is_owner: bool
    """this rank counts the piece in norms: exactly one rank per replica does, for every element"""
    counts_in_stage: bool
    """the same within a stage: of a tied weight, one rank of each stage counts each element"""
    is_first_replica: bool
    """this rank is the first replica, which writes the piece to disk"""

    def unpadded_runs(self) -> Iterator[tuple[int, int]]:
        """Yield the sub-intervals of [start, stop) without padding."""
        local = self.param.local_shape
        real = tuple(high - low for low, high in self.box)
        if real == local:
            if self.start < self.stop:
                yield self.start, self.stop
            return
        # Rows of the innermost padded dimension are contiguous; dimensions inside it are not padded.
        inner = max(dim for dim in range(len(local)) if real[dim] != local[dim])
        stride = math.prod(local[inner + 1 :])
        span, used = local[inner] * stride, real[inner] * stride
        for outer in range(self.start // span, -(-self.stop // span)):
            index, inside = outer, True
            for dim in range(inner - 1, -1, -1):
                index, position = divmod(index, local[dim])
                inside &= position < real[dim]
            low, high = max(self.start, outer * span), min(self.stop, outer * span + used)
            if inside and low < high:
                yield low, high


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The record of a model's parameters on a mesh, as one rank sees it."""

    param_groups: tuple[ParamGroupSpec, ...]
    coordinates: Coordinates
    """this rank's coordinates by mesh axis, its shard index "shard" and its replica index "replica"; for experts these
    are "expert shard" and "expert replica\""""

    def pieces(self) -> Iterator[Piece]:
        for group in self.param_groups:
            for param in group.params:
                yield self.piece(group, param)

    def piece(self, group: ParamGroupSpec, param: LogicalParam) -> Piece:
        shard = self.shard_index(group)
        start, stop = group.shard_interval(param, shard)
        return Piece(
            param=param,
            group_name=group.name,
            box=param.box(self.coordinates),
            start=start,
            stop=stop,
            shard_offset=group.offsets[param.name] + start - shard * group.shard_numel,
            is_owner=self._is_owner(param),
            counts_in_stage=self._counts_in_stage(param),
            is_first_replica=self._is_first_replica(group),
        )

    def _is_first_replica(self, group: ParamGroupSpec) -> bool:
        # Ranks that shard other groups are replicas of a group that is not sharded, as frozen ones below zero=3 are.
        prefix = "expert " if group.is_expert else ""
        is_first_copy = group.num_shards > 1 or self.coordinates[f"{prefix}shard"] == 0
        return is_first_copy and self.coordinates[f"{prefix}replica"] == 0

    def shard_index(self, group: ParamGroupSpec) -> int:
        """Return the index of the shard of a group that this rank holds."""
        return self.coordinates["shard" if not group.is_expert else "expert shard"] if group.num_shards > 1 else 0

    def _is_owner(self, param: LogicalParam) -> bool:
        is_first_stage = not param.tied_pp_ranks or param.tied_pp_ranks[0] == self.coordinates["pp"]
        return is_first_stage and self._counts_in_stage(param)

    def _counts_in_stage(self, param: LogicalParam) -> bool:
        copies = {cut.axis: cut.num_copies for cut in param.splits}
        if param.is_expert:
            return all(self.coordinates[axis] == 0 for axis in ("ep", "etp") if axis not in copies)
        # A grid's tp is the product of z, y and x: a split names either tp or these.
        inside = {axis: self.coordinates[axis] for axis in TP_AXES if axis in self.coordinates}
        if len(inside) > 1:
            inside.pop("tp", None)
        return all(at % copies[axis] == 0 if axis in copies else at == 0 for axis, at in inside.items())

    @property
    def params(self) -> dict[str, LogicalParam]:
        return {param.name: param for group in self.param_groups for param in group.params}


def group_params(
    params: Sequence[LogicalParam],
    roots: Mapping[str, bool],
    num_shards: int,
    num_expert_shards: int = 1,
    *,
    shard_frozen: bool = False,
) -> tuple[ParamGroupSpec, ...]:
    """Group parameters by the module in `roots` that holds them; the others, tied weights included, form the group "".

    Experts form groups of their own, by module: other ranks hold their shards. Parameters that stay float32 form one
    group, since a group has one dtype; it is mostly small, so it stays unsharded.

    `roots` maps each module to whether its group stays unsharded; the group "" does. A weight that several pp ranks
    hold forms a group of its own, so that its shards are the same intervals on all of them.

    Frozen parameters form groups beside the trainable ones of their module, without gradients and states; they are
    sharded with `shard_frozen` alone.
    """
    groups: dict[str, list[LogicalParam]] = {"": [], FP32_GROUP: [], **{root: [] for root in roots}}
    for param in params:
        if param.tied_pp_ranks:
            groups[param.name] = [param]
        elif param.is_expert:
            groups.setdefault(param.name.rpartition(".")[0], []).append(param)
        elif param.keep_fp32:
            groups[FP32_GROUP].append(param)
        else:
            owners = {next((root for root in roots if name.startswith(root + ".")), "") for name in param.names}
            groups[owners.pop() if len(owners) == 1 else ""].append(param)
    parts = (
        (name, name if trainable else name + FROZEN_SUFFIX, [p for p in members if p.trainable == trainable])
        for name, members in groups.items()
        for trainable in (True, False)
    )
    return tuple(
        ParamGroupSpec(
            name=name,
            params=tuple(members),
            num_shards=(num_expert_shards if members[0].is_expert else num_shards)
            if members[0].trainable or shard_frozen
            else 1,
            stays_unsharded=not members[0].is_expert and roots.get(module, True),
        )
        for module, name, members in parts
        if members
    )
