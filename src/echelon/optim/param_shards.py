"""Parameters as a rank holds them: one by one, or joined to runs where a rule does not care whose an element is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon.kernels import dispatch
from echelon.kernels.optim.stochastic_round import ElementIndices
from echelon.layout.placement import LogicalParam, Piece
from echelon.optim import optimizer_groups
from echelon.optim.matrix_shards import MatrixRectangle, MatrixStack, local_matrix_stack, shard_rectangles
from echelon.optim.stochastic_rounding import StochasticRounding, parameter_indices
from echelon.optim.update_rule import UpdateRule
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.dp.data_parallel import param_shard_axis
from echelon.parallel.dp.master_weights import SplitMasterWeights, UnsplitMasterWeights
from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.parallel_model import ParallelModel

if TYPE_CHECKING:
    from echelon.kernels.optim.factored_moments_triton import MatrixTiles

CHUNK_NUMEL = 1 << 20
"""elements at a time, which bounds what is made on the way"""
CHUNK_NUMEL_CUDA = 1 << 23
"""on a GPU, where a pass over fewer takes less time than to start it"""
RECTANGLE_NUMEL, RECTANGLE_NUMEL_CUDA = 1 << 22, 1 << 25
"""elements of a matrix at a time, by rules that look at matrices: they go over each part dozens of times"""


@dataclass(frozen=True, eq=False)
class ParamShard:
    """A trainable parameter, and the part of it that lies in this rank's shard of a unit; that may be nothing."""

    param_group: ParamGroup
    piece: Piece
    lr_factor: float
    """factor of the learning rate"""
    weight_decay: float
    axis: MeshAxis
    """ranks that hold its other parts"""
    rounding: StochasticRounding | None = None
    """where it has no master copy"""
    stack: MatrixStack = field(init=False)
    """the matrices of which the rank may hold something"""
    rectangles: tuple[MatrixRectangle, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stack", local_matrix_stack(self.entry))
        object.__setattr__(self, "rectangles", tuple(self.rectangles_of(self.piece)))

    def rectangles_of(self, piece: Piece) -> Iterator[MatrixRectangle]:
        """Of this parameter as it lies here, or on another rank."""
        return shard_rectangles(
            piece, RECTANGLE_NUMEL_CUDA if self.param_group.unsharded_param.is_cuda else RECTANGLE_NUMEL
        )

    @property
    def entry(self) -> LogicalParam:
        return self.piece.param

    @property
    def size(self) -> int:
        return self.piece.stop - self.piece.start

    @property
    def update_dtype(self) -> torch.dtype:
        return update_dtype(self.param_group)

    @property
    def shard_slice(self) -> slice:
        """In the shard of the unit."""
        return slice(self.piece.shard_offset, self.piece.shard_offset + self.size)

    @property
    def weights(self) -> tuple[Tensor, Tensor | None]:
        return _weight_tensors(self.param_group, self.shard_slice)

    @property
    def use_triton(self) -> bool:
        """Its elements are updated by our kernels."""
        return dispatch.use_triton_update(self.param_group.unsharded_param.device, self.update_dtype)

    def rectangle_weights(self, part: MatrixRectangle) -> tuple[Tensor, Tensor | None]:
        """The weights of a rectangle themselves, flat, or their two halves."""
        return _weight_tensors(self.param_group, self.rectangle_slice(part))

    def rounding_args(self, part: MatrixRectangle) -> tuple[Tensor | None, ElementIndices | None]:
        """(number of updates, place of its first element), where they are rounded by chance"""
        return (self.rounding.step, self.rounding.indices.advance(part.start)) if self.rounding else (None, None)

    def rectangle_slice(self, part: MatrixRectangle) -> slice:
        """In the shard of the unit."""
        first = self.piece.shard_offset
        return slice(first + part.start, first + part.stop)

    def scaled_gradient(self, part: MatrixRectangle, grad_scale: Tensor) -> Tensor:
        """Of a rectangle, in the type of the arithmetic, as a new tensor."""
        found = self.param_group.grad[self.rectangle_slice(part)].to(self.update_dtype) * grad_scale.to(
            self.update_dtype
        )
        return found.view(part.shape)

    def read_rectangle(self, part: MatrixRectangle) -> Tensor:
        return self.read_range(part.start, part.stop).view(part.shape)

    def write_rectangle(self, part: MatrixRectangle, values: Tensor) -> None:
        self.write_range(part.start, values.reshape(-1))

    def read_range(self, start: int, stop: int) -> Tensor:
        """Weights of its elements, in the type of the arithmetic."""
        first = self.piece.shard_offset
        return self.param_group.master.values(slice(first + start, first + stop)).to(self.update_dtype)

    def write_range(self, start: int, values: Tensor) -> None:
        made = values if self.rounding is None else self.rounding.round_values(values, start)
        self.param_group.master.set_values(self.piece.shard_offset + start, made)

    def zeros(self) -> Tensor:
        """A state of its elements."""
        return torch.zeros(self.size, dtype=self.update_dtype, device=self.param_group.unsharded_param.device)


def update_dtype(param_group: ParamGroup) -> torch.dtype:
    """The type of an update's arithmetic, and of moments: at least float32, whatever the weights are."""
    return torch.promote_types(param_group.master.dtype, torch.float32)


def _weight_tensors(unit: ParamGroup, where: slice) -> tuple[Tensor, Tensor | None]:
    """The weights themselves, or their two halves."""
    if isinstance(unit.master, SplitMasterWeights):
        return unit.master.high[where], unit.master.low[where]
    assert isinstance(unit.master, UnsplitMasterWeights)
    return unit.master.tensor[where], None


def state_rectangle(state: Tensor, part: MatrixRectangle) -> Tensor:
    """A rectangle of a state that belongs to a parameter's elements."""
    return state[part.start : part.stop].view(part.shape)


def matrix_tiles(shard: ParamShard, part: MatrixRectangle, grad_scale: Tensor) -> MatrixTiles:
    """A rectangle as kernels take it."""
    from echelon.kernels.optim.factored_moments_triton import MatrixTiles

    (high, low), (step, place) = shard.rectangle_weights(part), shard.rounding_args(part)
    real = part.rows[1] - part.rows[0], part.columns[1] - part.columns[0]
    gradient = shard.param_group.grad[shard.rectangle_slice(part)]
    return MatrixTiles(
        high=high,
        low=low,
        gradient=gradient,
        grad_scale=grad_scale,
        step=step,
        indices=place,
        shape=part.shape,
        unpadded=real,
    )


def uses_stochastic_rounding(param_group: ParamGroup) -> bool:
    """Its weights have no master copy: they are rounded by chance."""
    return param_group.master.dtype.itemsize < 4


def build_param_shards(
    parallel: ParallelModel,
    rule: UpdateRule,
    param_groups: Iterable[ParamGroup] | None = None,
    step: Tensor | None = None,
) -> list[ParamShard]:
    """The trainable parameters of all units, or of some; `step` counts updates where weights are rounded by chance."""
    given = [optimizer_groups.parse(text) for text in rule.groups]
    found = []
    for unit in parallel.sharded_model.param_groups if param_groups is None else param_groups:
        axis = parallel.axes.get_or_add(param_shard_axis(unit.policy))
        for entry in unit.spec.params:
            if entry.trainable:
                own = optimizer_groups.settings_for(given, rule, entry.name, decays=entry.decay)
                piece, chance = parallel.placement.piece(unit.spec, entry), None
                if step is not None and uses_stochastic_rounding(unit):
                    chance = StochasticRounding(parameter_indices(piece, parallel.options.seed), step)
                found.append(ParamShard(unit, piece, own.lr_factor, own.weight_decay, axis, chance))
    return found


@dataclass(frozen=True)
class FlatSegment:
    """Elements of a unit's shard that lie side by side and are updated alike, those that decay first."""

    param_group: ParamGroup
    start: int
    """in the unit's shard"""
    size: int
    num_decayed: int
    """how many of them decay; they come first"""
    weight_decay: float
    lr_factor: float
    """factor of the learning rate"""
    indices: ElementIndices
    """of its elements, for random numbers"""
    rounding: StochasticRounding | None = None
    """where they have no master copy; they are then of one parameter"""
    pieces: tuple[Piece, ...] = ()
    """of the parameters, one after another"""

    @property
    def shard_slice(self) -> slice:
        return slice(self.start, self.start + self.size)

    @property
    def gradient(self) -> Tensor:
        return self.param_group.grad[self.shard_slice]

    @property
    def weights(self) -> tuple[Tensor, Tensor | None]:
        return _weight_tensors(self.param_group, self.shard_slice)

    @property
    def step(self) -> Tensor | None:
        """Number of updates, where they are rounded by chance."""
        return self.rounding.step if self.rounding else None

    @property
    def use_triton(self) -> bool:
        """Its elements are updated by our kernels."""
        return dispatch.use_triton_update(self.param_group.unsharded_param.device, update_dtype(self.param_group))

    def zeros(self, dtype: torch.dtype | None = None) -> Tensor:
        """A state of its elements."""
        return torch.zeros(
            self.size, dtype=dtype or update_dtype(self.param_group), device=self.param_group.unsharded_param.device
        )

    def chunks(self) -> Iterator[tuple[slice, float]]:
        """Parts of the run with their weight decay."""
        most = CHUNK_NUMEL_CUDA if self.param_group.unsharded_param.is_cuda else CHUNK_NUMEL
        for begin, end, decay in ((0, self.num_decayed, self.weight_decay), (self.num_decayed, self.size, 0.0)):
            for start in range(begin, end, most):
                yield slice(start, min(start + most, end)), decay

    def read(self, part: slice) -> Tensor:
        found = self.param_group.master.values(slice(self.start + part.start, self.start + part.stop))
        return found.to(update_dtype(self.param_group))

    def write(self, part: slice, values: Tensor) -> None:
        made = values if self.rounding is None else self.rounding.round_values(values, part.start)
        self.param_group.master.set_values(self.start + part.start, made)


def build_flat_segments(
    parallel: ParallelModel,
    rule: UpdateRule,
    param_groups: Iterable[ParamGroup] | None = None,
    include: Callable[[LogicalParam], bool] = lambda _: True,
    step: Tensor | None = None,
) -> list[FlatSegment]:
    """A rank may hold no element at all (fewer elements than ranks); it still takes part in every collective."""
    firsts, first = {}, 0
    for unit in parallel.sharded_model.param_groups:
        firsts[unit.spec.name] = first + parallel.placement.shard_index(unit.spec) * unit.spec.shard_numel
        first += unit.spec.numel
    runs: list[FlatSegment] = []
    for held in build_param_shards(parallel, rule, param_groups, step):
        if held.size and include(held.entry):
            start = held.piece.shard_offset
            decayed = held.size if held.weight_decay else 0
            place = (
                held.rounding.indices if held.rounding else ElementIndices(firsts[held.param_group.spec.name] + start)
            )
            run = FlatSegment(
                held.param_group,
                start,
                held.size,
                decayed,
                held.weight_decay,
                held.lr_factor,
                place,
                held.rounding,
                (held.piece,),
            )
            if runs and (joined := _merge_segments(runs[-1], run)):
                runs[-1] = joined
            else:
                runs.append(run)
    return runs


def _merge_segments(a: FlatSegment, b: FlatSegment) -> FlatSegment | None:
    """Both as one, where they lie side by side and are updated alike."""
    if (
        a.param_group is not b.param_group
        or a.start + a.size != b.start
        or a.lr_factor != b.lr_factor
        or a.rounding
        or b.rounding
    ):
        return None
    if b.num_decayed and (a.num_decayed < a.size or a.weight_decay != b.weight_decay):
        return None
    return FlatSegment(
        a.param_group,
        a.start,
        a.size + b.size,
        a.num_decayed + b.num_decayed,
        a.weight_decay,
        a.lr_factor,
        a.indices,
        None,
        (*a.pieces, *b.pieces),
    )
