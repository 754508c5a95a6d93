"""`Mesh`: a layout over ranks 0 to world - 1.

[Note: from coordinates to ranks]

Axes are nested. tp is innermost, since it communicates most and neighbouring ranks have the fastest links; then cp;
then dp and pp in the order that rank_order.py chooses. dp is two axes, replica (outer) and shard (inner; one rank
under zero=0). With dp=4,shard=2,tp=2,pp=2:

    order=("pp", "dp")    pp 0                                pp 1
                          replica 0         replica 1         replica 0         replica 1
                          shard 0  shard 1  shard 0  shard 1  shard 0  shard 1  shard 0   shard 1
    tp 0 1                0 1      2 3      4 5      6 7      8 9      10 11    12 13     14 15

So the stride of an axis is the product of the sizes inside it, and a rank is the sum of coordinate x stride.

tp and cp are products of axes too if the layout asks for it: a grid of tp (2d, 2.5d, 3d) is z layers of y rows of x
ranks, and cp_kind=ring-ulysses is a ring of groups of neighbours that exchange heads (ulysses).

Experts are folded into the ranks of a stage: in the same order, tp innermost, these are edp x ep x etp too. The copies
of the experts (edp) are two axes, as dp is: ereplica (outer), and eshard (inner), the copies in one HSDP group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from echelon.layout.layout import Layout
from echelon.layout.rules import head_parallel_size
from echelon.layout.validation_error import did_you_mean

RankGroup = tuple[int, ...]

DEFAULT_ORDER = ("pp", "dp")
_ORDERS = (DEFAULT_ORDER, ("dp", "pp"))

EXPERT_DP_AXES = ("ereplica", "eshard")
"""the axes of edp"""
COMPOSITE_AXES = {"dp": ("replica", "shard"), "cp": ("ring", "ulysses"), "tp": ("z", "y", "x")}
"""axes that may be products of others"""
STAGE_AXES = ("dp", "cp", "tp")
EXPERT_AXES = (*EXPERT_DP_AXES, "ep", "etp")
"""the ranks of a stage (dp x cp x tp) as experts use them: copies, parts of the experts, parts of each expert"""


def _cp_axes(layout: Layout) -> dict[str, int]:
    if not 1 < layout.ulysses < layout.cp:
        return {"cp": layout.cp}
    return {"ring": layout.cp // layout.ulysses, "ulysses": layout.ulysses}


def _tp_axes(layout: Layout) -> dict[str, int]:
    """Return z layers of y rows of x ranks."""
    side = head_parallel_size(layout)
    if layout.tp_kind == "1d" or layout.tp == 1 or side is None:
        return {"tp": layout.tp}
    return {"z": layout.tp // side**2, "y": side, "x": side}


@dataclass(frozen=True)
class Mesh:
    """The mesh of a layout: the ranks of every axis.

    >>> mesh = ec.Mesh(ec.Layout.parse("dp=2,tp=2"))
    >>> mesh.coordinates(3)["tp"]
    1
    """

    layout: Layout
    order: tuple[str, str] = DEFAULT_ORDER
    """pp and dp, the outer one first"""
    axes: dict[str, int] = field(init=False, compare=False, repr=False)
    """the size of every axis, outermost first"""
    composites: dict[str, tuple[str, ...]] = field(init=False, compare=False, repr=False)
    """the axes that are products of others, outer one first"""

    def __post_init__(self) -> None:
        order = tuple(self.order)
        if order not in _ORDERS:
            raise ValueError(f"order must hold pp and dp once each (order={self.order}); use one of {_ORDERS}")
        sizes = self.layout
        dp_axes = {"replica": sizes.dp // sizes.num_shards, "shard": sizes.num_shards}
        outer = {"pp": {"pp": sizes.pp}, "dp": dp_axes}
        axes = {**outer[order[0]], **outer[order[1]], **_cp_axes(sizes), **_tp_axes(sizes)}
        if math.prod(axes.values()) != sizes.world:
            raise ValueError(f"shard does not divide dp (shard={sizes.shard}, dp={sizes.dp}); use a divisor of dp")
        object.__setattr__(self, "axes", axes)
        composites = {name: parts for name, parts in COMPOSITE_AXES.items() if set(parts) <= set(axes)}
        object.__setattr__(self, "composites", composites)

    @property
    def world(self) -> int:
        return self.layout.world

    @cached_property
    def strides(self) -> dict[str, int]:
        """Distance in ranks between two neighbours on an axis."""
        strides, stride = {}, 1
        for axis, size in reversed(self.axes.items()):
            strides[axis] = stride
            stride *= size
        return {axis: strides[axis] for axis in self.axes}

    def size(self, axis: str | Sequence[str]) -> int:
        """Return the ranks of an axis, or of a product of axes."""
        return math.prod(self.axes[name] for name in self._expand_axes(axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on every axis; "dp" is its position in replica x shard, and so on."""
        self._check_rank(rank)
        at = {axis: rank // stride % self.axes[axis] for axis, stride in self.strides.items()}
        for name, parts in self.composites.items():
            at[name] = 0
            for part in parts:
                at[name] = at[name] * self.axes[part] + at[part]
        return at | self._expert_coordinates((at["dp"] * self.layout.cp + at["cp"]) * self.layout.tp + at["tp"])

    def rank(self, **at: int) -> int:
        """Return the rank at some coordinates; missing axes count as 0. "dp" stands for replica and shard."""
        for name in self.composites.keys() & at.keys():
            parts, position = self.composites[name], at.pop(name)
            if set(parts) & set(at):
                raise ValueError(f"a rank is given by {name} or by {' and '.join(parts)}, not by both; leave one out")
            for part in reversed(parts[1:]):
                position, at[part] = divmod(position, self.axes[part])
            at[parts[0]] = position
        rank = 0
        for axis, position in at.items():
            self._expand_axes(axis)
            if not 0 <= position < self.axes[axis]:
                raise ValueError(f"{axis} has no position {position} (size {self.axes[axis]}); count from 0")
            rank += position * self.strides[axis]
        return rank

    @property
    def expert_axis_sizes(self) -> dict[str, int]:
        """Sizes of the expert axes, outermost first."""
        ep, etp, shards = self.layout.ep, self.layout.etp, self.layout.num_expert_shards
        return {"ereplica": self.size(STAGE_AXES) // (ep * etp * shards), "eshard": shards, "ep": ep, "etp": etp}

    def groups(self, axis: str | Sequence[str]) -> tuple[RankGroup, ...]:
        """Return the groups of ranks that differ only on one axis, or on several; they partition the world."""
        names = (axis,) if isinstance(axis, str) else tuple(axis)
        expert_names = [part for name in names for part in (EXPERT_DP_AXES if name == "edp" else (name,))]
        if set(expert_names) & set(EXPERT_AXES):
            return self._expert_groups(expert_names)
        inside = set(self._expand_axes(axis))
        members = self._rank_offsets([name for name in self.axes if name in inside])
        firsts = self._rank_offsets([name for name in self.axes if name not in inside])
        return tuple(tuple(first + member for member in members) for first in firsts)

    def peers(self, rank: int, axis: str | Sequence[str]) -> RankGroup:
        """Return the group of an axis that contains a rank, in the order of the axis."""
        self._check_rank(rank)
        inside = [name for name in self.axes if name in set(self._expand_axes(axis))]
        at = self.coordinates(rank)
        first = rank - sum(at[name] * self.strides[name] for name in inside)
        return tuple(first + member for member in self._rank_offsets(inside))

    def _expert_groups(self, names: Sequence[str]) -> tuple[RankGroup, ...]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, stage in enumerate(self.groups(STAGE_AXES)):
            for place, rank in enumerate(stage):
                at = self._expert_coordinates(place)
                others = (at[name] for name in EXPERT_AXES if name not in names)
                groups.setdefault((number, *others), []).append(rank)
        return tuple(sorted(map(tuple, groups.values())))

    def _expert_coordinates(self, place: int) -> dict[str, int]:
        """Return the coordinates on the expert axes of a rank's place in its stage."""
        at = {}
        for name in reversed(EXPERT_AXES):
            place, at[name] = divmod(place, self.expert_axis_sizes[name])
        return at | {"edp": at["ereplica"] * self.expert_axis_sizes["eshard"] + at["eshard"]}

    def _rank_offsets(self, names: Sequence[str]) -> list[int]:
        """Return every sum of coordinate x stride over some axes, smallest first."""
        steps = [range(0, self.axes[name] * self.strides[name], self.strides[name]) for name in names]
        return [sum(offsets) for offsets in product(*steps)]

    def _expand_axes(self, axis: str | Sequence[str]) -> tuple[str, ...]:
        names: list[str] = []
        for name in (axis,) if isinstance(axis, str) else axis:
            if name not in self.composites and name not in self.axes:
                known = (*self.axes, *self.composites)
                remedy = did_you_mean(name, known) or f"use one of {', '.join(known)}"
                raise ValueError(f"the mesh has no axis of this name (axis={name}); {remedy}")
            names += self.composites.get(name, (name,))
        return tuple(dict.fromkeys(names))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise ValueError(f"the mesh has no such rank (rank={rank}, world={self.world}); ranks count from 0")
