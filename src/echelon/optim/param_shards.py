"""Parameters as a rank holds them: one by one, or joined to runs where a rule does not care whose an element is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon.kernels import dispatch
from echelon.kernels.optim.fused_adamw import Place
from echelon.layout.placement import Entry, Piece
from echelon.optim import optimizer_groups
from echelon.optim.matrix_shards import Rectangle, Stack, held_stack, rectangles
from echelon.optim.stochastic_rounding import Chance, place_of
from echelon.optim.update_rule import Rule
from echelon.parallel.apply import Parallel, stage_axis
from echelon.parallel.comm.mesh_axis import Axis
from echelon.parallel.dp.master_weights import SplitMaster, WholeMaster
from echelon.parallel.dp.param_group import FlatUnit

if TYPE_CHECKING:
    from echelon.kernels.optim.factored_moments_triton import Tiles

CHUNK = 1 << 20
"""elements at a time, which bounds what is made on the way"""
CHUNK_CUDA = 1 << 23
"""on a GPU, where a pass over fewer takes less time than to start it"""
PART, PART_CUDA = 1 << 22, 1 << 25
"""elements of a matrix at a time, by rules that look at matrices: they go over each part dozens of times"""


@dataclass(frozen=True, eq=False)
class Held:
    """A trainable parameter, and the part of it that lies in this rank's shard of a unit; that may be nothing."""

    unit: FlatUnit
    piece: Piece
    lr: float
    """factor of the learning rate"""
    decay: float
    axis: Axis
    """ranks that hold its other parts"""
    chance: Chance | None = None
    """where it has no master copy"""
    stack: Stack = field(init=False)
    """the matrices of which the rank may hold something"""
    parts: tuple[Rectangle, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stack", held_stack(self.entry))
        object.__setattr__(self, "parts", tuple(self.parts_of(self.piece)))

    def parts_of(self, piece: Piece) -> Iterator[Rectangle]:
        """Of this parameter as it lies here, or on another rank."""
        return rectangles(piece, PART_CUDA if self.unit.full.is_cuda else PART)

    @property
    def entry(self) -> Entry:
        return self.piece.entry

    @property
    def size(self) -> int:
        return self.piece.stop - self.piece.start

    @property
    def exact(self) -> torch.dtype:
        return exact(self.unit)

    @property
    def everything(self) -> slice:
        """In the shard of the unit."""
        return slice(self.piece.shard_offset, self.piece.shard_offset + self.size)

    @property
    def weights(self) -> tuple[Tensor, Tensor | None]:
        return _weights(self.unit, self.everything)

    @property
    def has_kernels(self) -> bool:
        """Its elements are updated by our kernels."""
        return dispatch.updates(self.unit.full.device, self.exact)

    def weights_of(self, part: Rectangle) -> tuple[Tensor, Tensor | None]:
        """The weights of a rectangle themselves, flat, or their two halves."""
        return _weights(self.unit, self.where(part))

    def chance_of(self, part: Rectangle) -> tuple[Tensor | None, Place | None]:
        """(number of updates, place of its first element), where they are rounded by chance"""
        return (self.chance.step, self.chance.place.after(part.start)) if self.chance else (None, None)

    def where(self, part: Rectangle) -> slice:
        """In the shard of the unit."""
        first = self.piece.shard_offset
        return slice(first + part.start, first + part.stop)

    def gradient(self, part: Rectangle, scale: Tensor) -> Tensor:
        """Of a rectangle, in the type of the arithmetic, as a new tensor."""
        found = self.unit.grad[self.where(part)].to(self.exact) * scale.to(self.exact)
        return found.view(part.shape)

    def values(self, part: Rectangle) -> Tensor:
        return self.read(part.start, part.stop).view(part.shape)

    def set(self, part: Rectangle, values: Tensor) -> None:
        self.write(part.start, values.reshape(-1))

    def read(self, start: int, stop: int) -> Tensor:
        """Weights of its elements, in the type of the arithmetic."""
        first = self.piece.shard_offset
        return self.unit.master.values(slice(first + start, first + stop)).to(self.exact)

    def write(self, start: int, values: Tensor) -> None:
        made = values if self.chance is None else self.chance.rounded(values, start)
        self.unit.master.set(self.piece.shard_offset + start, made)

    def zeros(self) -> Tensor:
        """A state of its elements."""
        return torch.zeros(self.size, dtype=self.exact, device=self.unit.full.device)


def exact(unit: FlatUnit) -> torch.dtype:
    """The type of an update's arithmetic, and of moments: at least float32, whatever the weights are."""
    return torch.promote_types(unit.master.dtype, torch.float32)


def _weights(unit: FlatUnit, where: slice) -> tuple[Tensor, Tensor | None]:
    """The weights themselves, or their two halves."""
    if isinstance(unit.master, SplitMaster):
        return unit.master.high[where], unit.master.low[where]
    assert isinstance(unit.master, WholeMaster)
    return unit.master.tensor[where], None


def of(state: Tensor, part: Rectangle) -> Tensor:
    """A rectangle of a state that belongs to a parameter's elements."""
    return state[part.start : part.stop].view(part.shape)


def tiles_of(one: Held, part: Rectangle, scale: Tensor) -> Tiles:
    """A rectangle as kernels take it."""
    from echelon.kernels.optim.factored_moments_triton import Tiles

    (high, low), (step, place) = one.weights_of(part), one.chance_of(part)
    real = part.rows[1] - part.rows[0], part.columns[1] - part.columns[0]
    gradient = one.unit.grad[one.where(part)]
    return Tiles(
        high=high, low=low, gradient=gradient, scale=scale, step=step, place=place, sizes=part.shape, real=real
    )


def is_rounded(unit: FlatUnit) -> bool:
    """Its weights have no master copy: they are rounded by chance."""
    return unit.master.dtype.itemsize < 4


def held_of(
    parallel: Parallel, rule: Rule, units: Iterable[FlatUnit] | None = None, step: Tensor | None = None
) -> list[Held]:
    """The trainable parameters of all units, or of some; `step` counts updates where weights are rounded by chance."""
    given = [optimizer_groups.parse(text) for text in rule.groups]
    found = []
    for unit in parallel.flat.units if units is None else units:
        axis = parallel.axes.axis(stage_axis(unit.policy))
        for entry in unit.unit.entries:
            if entry.trainable:
                own = optimizer_groups.setting_of(given, rule, entry.name, decays=entry.decay)
                piece, chance = parallel.placement.piece(unit.unit, entry), None
                if step is not None and is_rounded(unit):
                    chance = Chance(place_of(piece, parallel.options.seed), step)
                found.append(Held(unit, piece, own.lr, own.decay, axis, chance))
    return found


@dataclass(frozen=True)
class Run:
    """Elements of a unit's shard that lie side by side and are updated alike, those that decay first."""

    unit: FlatUnit
    start: int
    """in the unit's shard"""
    size: int
    decayed: int
    """how many of them decay; they come first"""
    decay: float
    lr: float
    """factor of the learning rate"""
    place: Place
    """of its elements, for random numbers"""
    chance: Chance | None = None
    """where they have no master copy; they are then of one parameter"""
    pieces: tuple[Piece, ...] = ()
    """of the parameters, one after another"""

    @property
    def where(self) -> slice:
        return slice(self.start, self.start + self.size)

    @property
    def gradient(self) -> Tensor:
        return self.unit.grad[self.where]

    @property
    def weights(self) -> tuple[Tensor, Tensor | None]:
        return _weights(self.unit, self.where)

    @property
    def step(self) -> Tensor | None:
        """Number of updates, where they are rounded by chance."""
        return self.chance.step if self.chance else None

    @property
    def has_kernels(self) -> bool:
        """Its elements are updated by our kernels."""
        return dispatch.updates(self.unit.full.device, exact(self.unit))

    def zeros(self, dtype: torch.dtype | None = None) -> Tensor:
        """A state of its elements."""
        return torch.zeros(self.size, dtype=dtype or exact(self.unit), device=self.unit.full.device)

    def chunks(self) -> Iterator[tuple[slice, float]]:
        """Parts of the run with their weight decay."""
        most = CHUNK_CUDA if self.unit.full.is_cuda else CHUNK
        for begin, end, decay in ((0, self.decayed, self.decay), (self.decayed, self.size, 0.0)):
            for start in range(begin, end, most):
                yield slice(start, min(start + most, end)), decay

    def values(self, part: slice) -> Tensor:
        found = self.unit.master.values(slice(self.start + part.start, self.start + part.stop))
        return found.to(exact(self.unit))

    def set(self, part: slice, values: Tensor) -> None:
        made = values if self.chance is None else self.chance.rounded(values, part.start)
        self.unit.master.set(self.start + part.start, made)


def runs_of(
    parallel: Parallel,
    rule: Rule,
    units: Iterable[FlatUnit] | None = None,
    only: Callable[[Entry], bool] = lambda _: True,
    step: Tensor | None = None,
) -> list[Run]:
    """A rank may hold no element at all (fewer elements than ranks); it still takes part in every collective."""
    firsts, first = {}, 0
    for unit in parallel.flat.units:
        firsts[unit.unit.name] = first + parallel.placement.shard_of(unit.unit) * unit.unit.shard_numel
        first += unit.unit.numel
    runs: list[Run] = []
    for held in held_of(parallel, rule, units, step):
        if held.size and only(held.entry):
            start = held.piece.shard_offset
            decayed = held.size if held.decay else 0
            place = held.chance.place if held.chance else Place(firsts[held.unit.unit.name] + start)
            run = Run(held.unit, start, held.size, decayed, held.decay, held.lr, place, held.chance, (held.piece,))
            if runs and (joined := _joined(runs[-1], run)):
                runs[-1] = joined
            else:
                runs.append(run)
    return runs


def _joined(a: Run, b: Run) -> Run | None:
    """Both as one, where they lie side by side and are updated alike."""
    if a.unit is not b.unit or a.start + a.size != b.start or a.lr != b.lr or a.chance or b.chance:
        return None
    if b.decayed and (a.decayed < a.size or a.decay != b.decay):
        return None
    return Run(
        a.unit, a.start, a.size + b.size, a.decayed + b.decayed, a.decay, a.lr, a.place, None, (*a.pieces, *b.pieces)
    )
