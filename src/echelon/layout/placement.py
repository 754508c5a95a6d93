"""Where every logical parameter's pieces are, and who owns each element once.

[Note: from a logical tensor to a rank's shard]

A logical tensor is cut twice. Tensor parallelism cuts it into boxes; the boxes of a unit (a block, say) are laid one
after another into a flat buffer, and data parallelism cuts that buffer into equal shards:

    logical [6, 4]          tp=2 cuts dim 0         the unit's flat buffer, dp=3 shards of equal size
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
"""axes that decide who owns a piece. Shards and stages hold different elements, replicas the same ones"""
FP32_BYTES = 4
"""bytes of an element of a wide entry"""
FP32_GROUP = "(float32)"
"""the name of the unit of what is wide and not an expert's"""


@dataclass(frozen=True, kw_only=True)
class DimSplit:
    """One dimension of a tensor divided over one mesh axis; a second cut of it divides the parts of the first."""

    axis: str
    """the mesh axis whose coordinate picks the part"""
    dim: int
    """the tensor dimension that is divided"""
    num_parts: int
    """how many different parts there are; a size that does not divide is padded at the end"""
    num_copies: int = 1
    """how many neighbouring ranks of the axis hold the same part (replicated key-value heads)"""


@dataclass(frozen=True, kw_only=True)
class LogicalParam:
    """One logical parameter: its names, its shape, and how it is cut."""

    name: str
    """the first of its names in the model; disk and reports use this one"""
    names: tuple[str, ...]
    """every name it has: tied weights have several"""
    shape: tuple[int, ...]
    """the shape on one device"""
    splits: tuple[DimSplit, ...] = ()
    """the dimensions that are divided; none means a whole copy on every rank"""
    tied_pp_ranks: tuple[int, ...] = ()
    """the pp ranks that hold it, where several do (a tied weight); the first of them counts it"""
    partial_grad_axes: tuple[str, ...] = ()
    """axes over which each rank's gradient is only a part, to be summed once a step (see parallel/tp/sequence_parallel.py)"""
    decay: bool = True
    """weight decay applies (matrices); vectors are left alone"""
    trainable: bool = True
    """it has a gradient"""
    is_expert: bool = False
    """it is an expert's: its cuts are over ep and etp, and its copies lie on edp"""
    is_conv: bool = False
    """it is a convolution's: as a matrix it has a row for each output"""
    keep_fp32: bool = False
    """it is float32 beside a 16-bit compute type"""

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
        """The half-open range of each logical dimension; shorter than `local_shape` where that is padded."""
        ranges = [(0, size) for size in self.shape]
        widths = list(self.shape)
        for cut in self.splits:
            (low, high), part = ranges[cut.dim], coordinates[cut.axis] // cut.num_copies
            widths[cut.dim] = width = -(-widths[cut.dim] // cut.num_parts)
            ranges[cut.dim] = (min(low + part * width, high), min(low + (part + 1) * width, high))
        return tuple(ranges)


@dataclass(frozen=True, kw_only=True)
class ParamGroupSpec:
    """Parameters that are gathered, reduced and freed together, laid one after another in a flat buffer."""

    name: str
    """the module's name; the root is the empty name"""
    params: tuple[LogicalParam, ...]
    """in the order of the buffer: decayed, not decayed, frozen"""
    num_shards: int
    """how many equal shards the buffer is cut into; 1 keeps it whole"""
    stays_unsharded: bool = False
    """once gathered it stays whole until its gradients are there, as the root does"""
    offsets: dict[str, int] = field(init=False, repr=False, compare=False)
    """where each entry starts in the buffer"""

    def __post_init__(self) -> None:
        order = sorted(self.params, key=lambda entry: (not entry.trainable, not entry.decay))
        object.__setattr__(self, "params", tuple(order))
        offsets, position = {}, 0
        for entry in order:
            offsets[entry.name] = position
            position += entry.local_numel
        object.__setattr__(self, "offsets", offsets)

    @property
    def is_expert(self) -> bool:
        """Its parameters are experts'."""
        return self.params[0].is_expert

    @property
    def keep_fp32(self) -> bool:
        """Its parameters are float32, whatever the others are."""
        return self.params[0].keep_fp32

    def element_bytes(self, dtype_bytes: int) -> int:
        """Of an element, where one of the others has `size`."""
        return max(dtype_bytes, FP32_BYTES) if self.keep_fp32 else dtype_bytes

    @cached_property
    def numel(self) -> int:
        """Elements of the buffer in use, before it is padded to equal shards."""
        return sum(entry.local_numel for entry in self.params)

    @property
    def shard_numel(self) -> int:
        return -(-self.numel // self.num_shards)

    def shard_interval(self, param: LogicalParam, shard: int) -> tuple[int, int]:
        """The part [start, stop) of an entry's local tensor that lies in a shard; empty where start == stop."""
        offset, size = self.offsets[param.name], self.shard_numel
        start = min(max(shard * size - offset, 0), param.local_numel)
        stop = min(max((shard + 1) * size - offset, 0), param.local_numel)
        return start, stop

    def decay_ranges(self, shard: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The (decayed, not decayed) trainable ranges of a shard, relative to its start."""
        low, high = shard * self.shard_numel, (shard + 1) * self.shard_numel
        decayed = sum(e.local_numel for e in self.params if e.trainable and e.decay)
        trainable = sum(e.local_numel for e in self.params if e.trainable)

        def clip(start: int, stop: int) -> tuple[int, int]:
            start, stop = min(max(start, low), high), min(max(stop, low), high)
            return start - low, stop - low

        return clip(0, decayed), clip(decayed, trainable)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one rank holds of one logical parameter."""

    param: LogicalParam
    group_name: str
    box: tuple[tuple[int, int], ...]
    """the part of the logical tensor that the rank's local tensor covers"""
    start: int
    """first element held, in the row-major local tensor"""
    stop: int
    """one past the last element held"""
    shard_offset: int
    """where element `start` lies in the rank's shard of the unit"""
    is_owner: bool
    """this rank counts the piece in norms: exactly one rank of each replica does, for every element"""
    counts_in_stage: bool
    """the same inside a stage: of a weight that several stages hold, one rank of each stage counts each element"""
    is_first_replica: bool
    """of the replicas, this is the first: it writes the piece to disk"""

    def unpadded_runs(self) -> Iterator[tuple[int, int]]:
        """The sub-intervals of [start, stop) that are real elements, not padding."""
        local = self.param.local_shape
        real = tuple(high - low for low, high in self.box)
        if real == local:
            if self.start < self.stop:
                yield self.start, self.stop
            return
        # Rows of the innermost padded dimension are contiguous; everything inside it is whole.
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
    """The record of a whole model on a mesh, as one rank sees it."""

    param_groups: tuple[ParamGroupSpec, ...]
    coordinates: Coordinates
    """this rank's coordinates, by mesh axis; a rank holds shard number `at["shard"]` of every unit, and ranks that hold
    the same shards are told apart by `at["replica"]`. For experts these are "expert shard" and "expert replica"."""

    def pieces(self) -> Iterator[Piece]:
        for unit in self.param_groups:
            for entry in unit.params:
                yield self.piece(unit, entry)

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
            is_first_replica=self.coordinates["replica" if not param.is_expert else "expert replica"] == 0,
        )

    def shard_index(self, group: ParamGroupSpec) -> int:
        """The number of the shard of a unit that this rank holds."""
        return self.coordinates["shard" if not group.is_expert else "expert shard"] if group.num_shards > 1 else 0

    def _is_owner(self, entry: LogicalParam) -> bool:
        return self._counts_in_stage(entry) and not (
            entry.tied_pp_ranks and entry.tied_pp_ranks[0] != self.coordinates["pp"]
        )

    def _counts_in_stage(self, entry: LogicalParam) -> bool:
        copies = {cut.axis: cut.num_copies for cut in entry.splits}
        if entry.is_expert:
            return all(self.coordinates[axis] == 0 for axis in ("ep", "etp") if axis not in copies)
        # tp is the product of z, y and x where they are there: a cut names either the one or the others.
        inside = [axis for axis in TP_AXES if axis in self.coordinates]
        inside = [axis for axis in inside if axis != "tp" or len(inside) == 1]
        return all(
            self.coordinates[axis] % copies[axis] == 0 if axis in copies else self.coordinates[axis] == 0
            for axis in inside
        )

    @property
    def params(self) -> dict[str, LogicalParam]:
        return {entry.name: entry for unit in self.param_groups for entry in unit.params}


def group_params(
    params: Sequence[LogicalParam], roots: Mapping[str, bool], num_shards: int, num_expert_shards: int = 1
) -> tuple[ParamGroupSpec, ...]:
    """Groups entries by the module in `roots` that holds them; what none holds (tied weights too) forms the unit "".

    Experts form units of their own, by their module: their shards lie on other ranks. What is wide forms one unit, as a
    unit has one type; it is mostly small, so it is kept.

    `roots` says of each module whether its unit is kept; the unit "" is. What several pp ranks hold forms a unit of its
    own: its shards are then the same intervals on all of them.
    """
    groups: dict[str, list[LogicalParam]] = {"": [], FP32_GROUP: [], **{root: [] for root in roots}}
    for entry in params:
        if entry.tied_pp_ranks:
            groups[entry.name] = [entry]
            continue
        if entry.is_expert:
            groups.setdefault(entry.name.rpartition(".")[0], []).append(entry)
            continue
        if entry.keep_fp32:
            groups[FP32_GROUP].append(entry)
            continue
        homes = {next((root for root in roots if name.startswith(root + ".")), "") for name in entry.names}
        groups[homes.pop() if len(homes) == 1 else ""].append(entry)
    return tuple(
        ParamGroupSpec(
            name=name,
            params=tuple(found),
            num_shards=num_expert_shards if found[0].is_expert else num_shards,
            stays_unsharded=not found[0].is_expert and roots.get(name, True),
        )
        for name, found in groups.items()
        if found
    )
