"""Parameter shards: each trainable parameter as one rank holds it, with its optimizer settings.

Optimizers that look at matrices (LAMB, Adafactor, SM3, Muon, AdamW in int8) work on these. Elementwise optimizers work
on flat_segments.py, which joins neighbouring shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
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


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardRange:
    """Consecutive elements of a parameter group's shard, with their optimizer settings."""

    param_group: ParamGroup
    start: int
    """in the group's shard"""
    size: int
    lr_factor: float
    """multiplies the learning rate"""
    weight_decay: float
    rounding: StochasticRounding | None = None
    """for bfloat16 elements without master weights, which are then of one parameter"""

    @property
    def shard_slice(self) -> slice:
        return slice(self.start, self.start + self.size)

    @property
    def gradient(self) -> Tensor:
        return self.param_group.grad[self.shard_slice]

    @property
    def weights(self) -> tuple[Tensor, Tensor | None]:
        """The stored master weights, or their two halves."""
        return stored_weights(self.param_group, self.shard_slice)

    @property
    def update_dtype(self) -> torch.dtype:
        """The dtype of the update's arithmetic and of moments: at least float32, whatever the weights are."""
        return torch.promote_types(self.param_group.master.dtype, torch.float32)

    @property
    def use_triton(self) -> bool:
        return dispatch.use_triton_update(self.param_group.unsharded_param.device, self.update_dtype)

    def read(self, elements: slice) -> Tensor:
        """Return the master weights of a part of the range, in the dtype of the update."""
        return self.param_group.master.values(_shift(elements, self.start)).to(self.update_dtype)

    def write(self, elements: slice, values: Tensor) -> None:
        """Write the master weights of a part of the range, rounded stochastically where there are none."""
        rounded = values if self.rounding is None else self.rounding.round_values(values, elements.start)
        self.param_group.master.set_values(self.start + elements.start, rounded)

    def zeros(self, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate an optimizer state with one value per element."""
        device = self.param_group.unsharded_param.device
        return torch.zeros(self.size, dtype=dtype or self.update_dtype, device=device)


@dataclass(frozen=True, eq=False, kw_only=True)
class ParamShard(ShardRange):
    """This rank's piece of a trainable parameter; it may be empty."""

    piece: Piece
    axis: MeshAxis
    """ranks that hold the other pieces"""
    stack: MatrixStack = field(init=False)
    """the matrices of which the rank may hold elements"""
    rectangles: tuple[MatrixRectangle, ...] = field(init=False)
    """the piece as rectangles of these matrices"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stack", local_matrix_stack(self.param))
        object.__setattr__(self, "rectangles", tuple(self.rectangles_of(self.piece)))

    @property
    def param(self) -> LogicalParam:
        return self.piece.param

    def rectangles_of(self, piece: Piece) -> Iterator[MatrixRectangle]:
        """Split this parameter's piece, of this rank or another, into rectangles."""
        on_gpu = self.param_group.unsharded_param.is_cuda
        return shard_rectangles(piece, RECTANGLE_NUMEL_CUDA if on_gpu else RECTANGLE_NUMEL)

    # -- plain torch: values in the dtype of the update ---------------------------------------------------------------

    def scaled_gradient(self, rectangle: MatrixRectangle, grad_scale: Tensor) -> Tensor:
        """Return a rectangle's gradient times `grad_scale`, as a new tensor."""
        gradient = self.rectangle_gradient(rectangle).to(self.update_dtype)
        return (gradient * grad_scale.to(self.update_dtype)).view(rectangle.shape)

    def read_rectangle(self, rectangle: MatrixRectangle) -> Tensor:
        return self.read(rectangle.elements).view(rectangle.shape)

    def write_rectangle(self, rectangle: MatrixRectangle, values: Tensor) -> None:
        self.write(rectangle.elements, values.reshape(-1))

    # -- Triton: tensors as they are stored ---------------------------------------------------------------------------

    def rectangle_gradient(self, rectangle: MatrixRectangle) -> Tensor:
        return self.param_group.grad[_shift(rectangle.elements, self.start)]

    def rectangle_weights(self, rectangle: MatrixRectangle) -> tuple[Tensor, Tensor | None]:
        """Return a rectangle's stored weights, flat, or their two halves."""
        return stored_weights(self.param_group, _shift(rectangle.elements, self.start))

    def rounding_args(self, rectangle: MatrixRectangle) -> tuple[Tensor | None, ElementIndices | None]:
        """Return (update count, element indices of the rectangle) where weights are rounded stochastically."""
        return (self.rounding.step, self.rounding.indices.advance(rectangle.start)) if self.rounding else (None, None)


def _shift(elements: slice, start: int) -> slice:
    return slice(start + elements.start, start + elements.stop)


def stored_weights(param_group: ParamGroup, where: slice) -> tuple[Tensor, Tensor | None]:
    """Return the stored master weights, or their two halves (kernels/optim/split_fp32.py)."""
    master = param_group.master
    if isinstance(master, SplitMasterWeights):
        return master.high[where], master.low[where]
    assert isinstance(master, UnsplitMasterWeights)
    return master.tensor[where], None


def state_rectangle(state: Tensor, rectangle: MatrixRectangle) -> Tensor:
    """View a rectangle of an elementwise state."""
    return state[rectangle.elements].view(rectangle.shape)


def matrix_tiles(shard: ParamShard, rectangle: MatrixRectangle, grad_scale: Tensor) -> MatrixTiles:
    """Return a rectangle in the form that the Triton kernels take."""
    from echelon.kernels.optim.factored_moments_triton import MatrixTiles

    (high, low), (step, indices) = shard.rectangle_weights(rectangle), shard.rounding_args(rectangle)
    return MatrixTiles(
        high=high,
        low=low,
        gradient=shard.rectangle_gradient(rectangle),
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
            shards.append(
                ParamShard(
                    param_group=param_group,
                    start=piece.shard_offset,
                    size=piece.stop - piece.start,
                    **asdict(settings),
                    rounding=rounding,
                    piece=piece,
                    axis=axis,
                )
            )
    return shards
