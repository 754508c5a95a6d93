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

INSIDE = ("tp", "z", "y", "x")
"""axes that decide who owns a piece. Shards and stages hold different elements, replicas the same ones"""
WIDE = 4
"""bytes of an element of a wide entry"""
WIDE_UNIT = "(float32)"
"""the name of the unit of what is wide and not an expert's"""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One dimension of a tensor divided over one mesh axis; a second cut of it divides the parts of the first."""

    axis: str
    """the mesh axis whose coordinate picks the part"""
    dim: int
    """the tensor dimension that is divided"""
    parts: int
    """how many different parts there are; a size that does not divide is padded at the end"""
    copies: int = 1
    """how many neighbouring ranks of the axis hold the same part (replicated key-value heads)"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One logical parameter: its names, its shape, and how it is cut."""

    name: str
    """the first of its names in the model; disk and reports use this one"""
    names: tuple[str, ...]
    """every name it has: tied weights have several"""
    shape: tuple[int, ...]
    """the shape on one device"""
    cuts: tuple[Cut, ...] = ()
    """the dimensions that are divided; none means a whole copy on every rank"""
    holders: tuple[int, ...] = ()
    """the pp ranks that hold it, where several do (a tied weight); the first of them counts it"""
    sum_over: tuple[str, ...] = ()
    """axes over which each rank's gradient is only a part, to be summed once a step (see parallel/tp/sequence_parallel.py)"""
    decay: bool = True
    """weight decay applies (matrices); vectors are left alone"""
    trainable: bool = True
    """it has a gradient"""
    folded: bool = False
    """it is an expert's: its cuts are over ep and etp, and its copies lie on edp"""
    filters: bool = False
    """it is a convolution's: as a matrix it has a row for each output"""
    wide: bool = False
    """it is float32 beside a 16-bit compute type"""

    @property
    def local_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        for cut in self.cuts:
            shape[cut.dim] = -(-shape[cut.dim] // cut.parts)
        return tuple(shape)

    @cached_property
    def local_numel(self) -> int:
        return math.prod(self.local_shape)

    def box(self, at: Coordinates) -> tuple[tuple[int, int], ...]:
        """The half-open range of each logical dimension; shorter than `local_shape` where that is padded."""
        ranges = [(0, size) for size in self.shape]
        widths = list(self.shape)
        for cut in self.cuts:
            (low, high), part = ranges[cut.dim], at[cut.axis] // cut.copies
            widths[cut.dim] = width = -(-widths[cut.dim] // cut.parts)
            ranges[cut.dim] = (min(low + part * width, high), min(low + (part + 1) * width, high))
        return tuple(ranges)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that are gathered, reduced and freed together, laid one after another in a flat buffer."""

    name: str
    """the module's name; the root is the empty name"""
    entries: tuple[Entry, ...]
    """in the order of the buffer: decayed, not decayed, frozen"""
    shards: int
    """how many equal shards the buffer is cut into; 1 keeps it whole"""
    kept: bool = False
    """once gathered it stays whole until its gradients are there, as the root does"""
    offsets: dict[str, int] = field(init=False, repr=False, compare=False)
    """where each entry starts in the buffer"""

    def __post_init__(self) -> None:
        order = sorted(self.entries, key=lambda entry: (not entry.trainable, not entry.decay))
        object.__setattr__(self, "entries", tuple(order))
        offsets, position = {}, 0
        for entry in order:
            offsets[entry.name] = position
            position += entry.local_numel
        object.__setattr__(self, "offsets", offsets)

    @property
    def folded(self) -> bool:
        """Its parameters are experts'."""
        return self.entries[0].folded

    @property
    def wide(self) -> bool:
        """Its parameters are float32, whatever the others are."""
        return self.entries[0].wide

    def bytes_of(self, size: int) -> int:
        """Of an element, where one of the others has `size`."""
        return max(size, WIDE) if self.wide else size

    @cached_property
    def numel(self) -> int:
        """Elements of the buffer in use, before it is padded to equal shards."""
        return sum(entry.local_numel for entry in self.entries)

    @property
    def shard_numel(self) -> int:
        return -(-self.numel // self.shards)

    def interval(self, entry: Entry, shard: int) -> tuple[int, int]:
        """The part [start, stop) of an entry's local tensor that lies in a shard; empty where start == stop."""
        offset, size = self.offsets[entry.name], self.shard_numel
        start = min(max(shard * size - offset, 0), entry.local_numel)
        stop = min(max((shard + 1) * size - offset, 0), entry.local_numel)
        return start, stop

    def decay_ranges(self, shard: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The (decayed, not decayed) trainable ranges of a shard, relative to its start."""
        low, high = shard * self.shard_numel, (shard + 1) * self.shard_numel
        decayed = sum(e.local_numel for e in self.entries if e.trainable and e.decay)
        trainable = sum(e.local_numel for e in self.entries if e.trainable)

        def clip(start: int, stop: int) -> tuple[int, int]:
            start, stop = min(max(start, low), high), min(max(stop, low), high)
            return start - low, stop - low

        return clip(0, decayed), clip(decayed, trainable)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one rank holds of one logical parameter."""

    entry: Entry
    unit: str
    box: tuple[tuple[int, int], ...]
    """the part of the logical tensor that the rank's local tensor covers"""
    start: int
    """first element held, in the row-major local tensor"""
    stop: int
    """one past the last element held"""
    shard_offset: int
    """where element `start` lies in the rank's shard of the unit"""
    owner: bool
    """this rank counts the piece in norms: exactly one rank of each replica does, for every element"""
    counts: bool
    """the same inside a stage: of a weight that several stages hold, one rank of each stage counts each element"""
    first: bool
    """of the replicas, this is the first: it writes the piece to disk"""

    def runs(self) -> Iterator[tuple[int, int]]:
        """The sub-intervals of [start, stop) that are real elements, not padding."""
        local = self.entry.local_shape
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

    units: tuple[Unit, ...]
    at: Coordinates
    """this rank's coordinates, by mesh axis; a rank holds shard number `at["shard"]` of every unit, and ranks that hold
    the same shards are told apart by `at["replica"]`. For experts these are "expert shard" and "expert replica"."""

    def pieces(self) -> Iterator[Piece]:
        for unit in self.units:
            for entry in unit.entries:
                yield self.piece(unit, entry)

    def piece(self, unit: Unit, entry: Entry) -> Piece:
        shard = self.shard_of(unit)
        start, stop = unit.interval(entry, shard)
        return Piece(
            entry=entry,
            unit=unit.name,
            box=entry.box(self.at),
            start=start,
            stop=stop,
            shard_offset=unit.offsets[entry.name] + start - shard * unit.shard_numel,
            owner=self._owns(entry),
            counts=self._counts(entry),
            first=self.at["replica" if not entry.folded else "expert replica"] == 0,
        )

    def shard_of(self, unit: Unit) -> int:
        """The number of the shard of a unit that this rank holds."""
        return self.at["shard" if not unit.folded else "expert shard"] if unit.shards > 1 else 0

    def _owns(self, entry: Entry) -> bool:
        return self._counts(entry) and not (entry.holders and entry.holders[0] != self.at["pp"])

    def _counts(self, entry: Entry) -> bool:
        copies = {cut.axis: cut.copies for cut in entry.cuts}
        if entry.folded:
            return all(self.at[axis] == 0 for axis in ("ep", "etp") if axis not in copies)
        # tp is the product of z, y and x where they are there: a cut names either the one or the others.
        inside = [axis for axis in INSIDE if axis in self.at]
        inside = [axis for axis in inside if axis != "tp" or len(inside) == 1]
        return all(self.at[axis] % copies[axis] == 0 if axis in copies else self.at[axis] == 0 for axis in inside)

    @property
    def entries(self) -> dict[str, Entry]:
        return {entry.name: entry for unit in self.units for entry in unit.entries}


def units_of(
    entries: Sequence[Entry], roots: Mapping[str, bool], shards: int, folded_shards: int = 1
) -> tuple[Unit, ...]:
    """Groups entries by the module in `roots` that holds them; what none holds (tied weights too) forms the unit "".

    Experts form units of their own, by their module: their shards lie on other ranks. What is wide forms one unit, as a
    unit has one type; it is mostly small, so it is kept.

    `roots` says of each module whether its unit is kept; the unit "" is. What several pp ranks hold forms a unit of its
    own: its shards are then the same intervals on all of them.
    """
    groups: dict[str, list[Entry]] = {"": [], WIDE_UNIT: [], **{root: [] for root in roots}}
    for entry in entries:
        if entry.holders:
            groups[entry.name] = [entry]
            continue
        if entry.folded:
            groups.setdefault(entry.name.rpartition(".")[0], []).append(entry)
            continue
        if entry.wide:
            groups[WIDE_UNIT].append(entry)
            continue
        homes = {next((root for root in roots if name.startswith(root + ".")), "") for name in entry.names}
        groups[homes.pop() if len(homes) == 1 else ""].append(entry)
    return tuple(
        Unit(
            name=name,
            entries=tuple(found),
            shards=folded_shards if found[0].folded else shards,
            kept=not found[0].folded and roots.get(name, True),
        )
        for name, found in groups.items()
        if found
    )
