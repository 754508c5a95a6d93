"""Parameter shards: each trainable parameter as one rank holds it, with its optimizer settings.

Optimizers that look at matrices (LAMB, Adafactor, SM3, Muon, AdamW in int8) work on these. Elementwise optimizers work
on flat_segments.py, which joins neighbouring shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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

RECTANGLE_NUMEL, RECTANGLE_NUMEL_CUDA = 1 << 22, 1 << 25
"""elements of a matrix at a time: matrix optimizers pass over each rectangle dozens of times"""


@dataclass(frozen=True, eq=False)
class ParamShard:
    """A trainable parameter, and this rank's piece of it in a parameter group's shard; the piece may be empty."""

    param_group: ParamGroup
    piece: Piece
    lr_factor: float
    """multiplies the learning rate"""
    weight_decay: float
    axis: MeshAxis
    """ranks that hold the other pieces"""
    rounding: StochasticRounding | None = None
    """for bfloat16 parameters without master weights"""
    stack: MatrixStack = field(init=False)
    """the matrices of which the rank may hold elements"""
    rectangles: tuple[MatrixRectangle, ...] = field(init=False)
    """the piece as rectangles of these matrices"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stack", local_matrix_stack(self.param))
        object.__setattr__(self, "rectangles", tuple(self.rectangles_of(self.piece)))

    # -- where it is --------------------------------------------------------------------------------------------------

    @property
    def param(self) -> LogicalParam:
        return self.piece.param

    @property
    def size(self) -> int:
        return self.piece.stop - self.piece.start

    @property
    def shard_slice(self) -> slice:
        """The piece, within the parameter group's shard."""
        return slice(self.piece.shard_offset, self.piece.shard_offset + self.size)

    def rectangle_slice(self, rectangle: MatrixRectangle) -> slice:
        """A rectangle, within the parameter group's shard."""
        first = self.piece.shard_offset
        return slice(first + rectangle.start, first + rectangle.stop)

    def rectangles_of(self, piece: Piece) -> Iterator[MatrixRectangle]:
        """Split this parameter's piece, of this rank or another, into rectangles."""
        on_gpu = self.param_group.unsharded_param.is_cuda
        return shard_rectangles(piece, RECTANGLE_NUMEL_CUDA if on_gpu else RECTANGLE_NUMEL)

    # -- plain torch: values in the dtype of the update ---------------------------------------------------------------

    @property
    def update_dtype(self) -> torch.dtype:
        return update_dtype(self.param_group)

    def scaled_gradient(self, rectangle: MatrixRectangle, grad_scale: Tensor) -> Tensor:
        """Return a rectangle's gradient times `grad_scale`, as a new tensor."""
        gradient = self.param_group.grad[self.rectangle_slice(rectangle)].to(self.update_dtype)
        return (gradient * grad_scale.to(self.update_dtype)).view(rectangle.shape)

    def read_rectangle(self, rectangle: MatrixRectangle) -> Tensor:
        return self.read_range(rectangle.start, rectangle.stop).view(rectangle.shape)

    def write_rectangle(self, rectangle: MatrixRectangle, values: Tensor) -> None:
        self.write_range(rectangle.start, values.reshape(-1))

    def read_range(self, start: int, stop: int) -> Tensor:
        """Return the master weights of elements [start, stop) of the piece."""
        first = self.piece.shard_offset
        return self.param_group.master.values(slice(first + start, first + stop)).to(self.update_dtype)

    def write_range(self, start: int, values: Tensor) -> None:
        """Write master weights from element `start` of the piece on, rounded stochastically where there are none."""
        rounded = values if self.rounding is None else self.rounding.round_values(values, start)
        self.param_group.master.set_values(self.piece.shard_offset + start, rounded)

    def zeros(self) -> Tensor:
        """Allocate an optimizer state with one value per element."""
        return torch.zeros(self.size, dtype=self.update_dtype, device=self.param_group.unsharded_param.device)

    # -- Triton: tensors as they are stored ---------------------------------------------------------------------------

    @property
    def use_triton(self) -> bool:
        return dispatch.use_triton_update(self.param_group.unsharded_param.device, self.update_dtype)

    @property
    def weights(self) -> tuple[Tensor, Tensor | None]:
        """The stored weights, or their two halves."""
        return stored_weights(self.param_group, self.shard_slice)

    def rectangle_weights(self, rectangle: MatrixRectangle) -> tuple[Tensor, Tensor | None]:
        """Return a rectangle's stored weights, flat, or their two halves."""
        return stored_weights(self.param_group, self.rectangle_slice(rectangle))

    def rounding_args(self, rectangle: MatrixRectangle) -> tuple[Tensor | None, ElementIndices | None]:
        """Return (update count, element indices of the rectangle) where weights are rounded stochastically."""
        return (self.rounding.step, self.rounding.indices.advance(rectangle.start)) if self.rounding else (None, None)


def update_dtype(param_group: ParamGroup) -> torch.dtype:
    """Return the dtype of the update's arithmetic and of moments: at least float32, whatever the weights are."""
    return torch.promote_types(param_group.master.dtype, torch.float32)


def stored_weights(param_group: ParamGroup, where: slice) -> tuple[Tensor, Tensor | None]:
    """Return the stored master weights, or their two halves (kernels/optim/split_fp32.py)."""
    master = param_group.master
    if isinstance(master, SplitMasterWeights):
        return master.high[where], master.low[where]
    assert isinstance(master, UnsplitMasterWeights)
    return master.tensor[where], None


def state_rectangle(state: Tensor, rectangle: MatrixRectangle) -> Tensor:
    """View a rectangle of an elementwise state."""
    return state[rectangle.start : rectangle.stop].view(rectangle.shape)


def matrix_tiles(shard: ParamShard, rectangle: MatrixRectangle, grad_scale: Tensor) -> MatrixTiles:
    """Return a rectangle in the form that the Triton kernels take."""
    from echelon.kernels.optim.factored_moments_triton import MatrixTiles

    (high, low), (step, indices) = shard.rectangle_weights(rectangle), shard.rounding_args(rectangle)
    return MatrixTiles(
        high=high,
        low=low,
        gradient=shard.param_group.grad[shard.rectangle_slice(rectangle)],
        grad_scale=grad_scale,
        step=step,
        indices=indices,
        shape=rectangle.shape,
        unpadded=(rectangle.rows[1] - rectangle.rows[0], rectangle.columns[1] - rectangle.columns[0]),
    )


def uses_stochastic_rounding(param_group: ParamGroup) -> bool:
    """Return whether the group has no fp32 master weights, so its weights are rounded stochastically."""
    return param_group.master.dtype.itemsize < 4


def build_param_shards(
    parallel: ParallelModel,
    rule: UpdateRule,
    param_groups: Iterable[ParamGroup] | None = None,
    step: Tensor | None = None,
) -> list[ParamShard]:
    """Return the shards of all trainable parameters, or of those in `param_groups`.

    `step` counts updates; stochastic rounding needs it.
    """
    groups = [optimizer_groups.parse(text) for text in rule.groups]
    shards = []
    for param_group in parallel.sharded_model.param_groups if param_groups is None else param_groups:
        axis = parallel.axes.get_or_add(param_shard_axis(param_group.policy))
        for param in param_group.spec.params:
            if not param.trainable:
                continue
            settings = optimizer_groups.settings_for(groups, rule, param.name, decays=param.decay)
            piece, rounding = parallel.placement.piece(param_group.spec, param), None
            if step is not None and uses_stochastic_rounding(param_group):
                rounding = StochasticRounding(parameter_indices(piece, parallel.options.seed), step)
            shards.append(ParamShard(param_group, piece, settings.lr_factor, settings.weight_decay, axis, rounding))
    return shards
