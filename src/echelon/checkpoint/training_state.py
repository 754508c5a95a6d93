"""One rank's part of a training state, by logical name: parameters, optimizer states, EMA, buffers, scalars.

    model.<parameter>               master weights; the device's lower-precision weights are derived from them
    optimizer.<state>.<parameter>   `mean`, `square`, `momentum`, `rows`, `columns`, `step`, ... (optimizer_state.py)
    average.<parameter>             EMA of the weights
    buffer.<name>                   running statistics, biases of gates
    train.<name>                    loss scale, targets of the last step

Of replicas, one rank writes: every element is written once. The frozen weights under adapters (LoRA) are no part of the
state: they are read or drawn again, and their hash is compared (frozen_weights.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from echelon.checkpoint.tensor_slices import LocalSlice, PlacedBox
from echelon.layout.placement import Piece
from echelon.optim.matrix_shards import matrix_stack
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState
from echelon.optim.rules.ema import WeightEMA
from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.parallel_model import ParallelModel

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' names"""


@dataclass(frozen=True)
class StateItem:
    """A rank's slice of one logical tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """of the logical tensor"""
    local_slice: LocalSlice
    is_writer: bool
    """whether this rank writes it"""
    read: Callable[[], Tensor]
    """its elements, flat"""
    write: Callable[[Tensor], None]
    """sets them; padding must be 0"""
    stable_until_update: bool = True
    """whether `read` returns the same values until the next update; false for states on disk and for buffers"""

    @property
    def size(self) -> int:
        return self.local_slice.stop - self.local_slice.start

    def boxes(self) -> list[PlacedBox]:
        return self.local_slice.boxes()


@dataclass(frozen=True)
class ScalarState:
    """A scalar of the run, which every rank holds."""

    dtype: torch.dtype
    read: Callable[[], Tensor]
    write: Callable[[Tensor], None]


class TrainingState:
    """One rank's part of a training state; its items always come in the same order."""

    def __init__(
        self,
        parallel: ParallelModel,
        optimizer: ShardedOptimizer,
        average: WeightEMA | None = None,
        scalars: Mapping[str, ScalarState] | None = None,
        *,
        has_adapters: bool = False,
    ):
        """With `has_adapters`, frozen weights are left out."""
        self._parallel, self._optimizer, self._average = parallel, optimizer, average
        self._scalars, self.has_adapters = scalars or {}, has_adapters

    def items(self, *, restoring: bool = False) -> Iterator[StateItem]:
        """With `restoring`, each parameter group refreshes what it derives from its weights after they were written."""
        sharded_model = self._parallel.sharded_model
        for group in sharded_model.trainable_groups if self.has_adapters else sharded_model.param_groups:
            yield from self._parameters(group)
            if restoring:
                group.after_update()
        for state in self._optimizer.named_states():
            yield _optimizer_item(f"optimizer.{state.name}", state)
        for state in self._average.named_states() if self._average is not None else ():
            yield _optimizer_item(state.name, state)
        yield from self._buffers()
        is_writer = self._parallel.axes.rank == 0
        for name, scalar in self._scalars.items():
            yield _full_item(f"train.{name}", scalar.dtype, (), is_writer, scalar.read, scalar.write)

    def frozen_items(self) -> Iterator[StateItem]:
        """The frozen weights."""
        for group in self._parallel.sharded_model.param_groups:
            if not group.spec.trainable:
                yield from self._parameters(group)

    def _parameters(self, group: ParamGroup) -> Iterator[StateItem]:
        placement = self._parallel.sharded_model.placement
        for entry in group.spec.params:
            yield _parameter_item(group, placement.piece(group.spec, entry))

    def _buffers(self) -> Iterator[StateItem]:
        model, coordinates = self._parallel.model, self._parallel.axes.coordinates
        persistent = model.state_dict(keep_vars=True).keys()
        is_writer = all(coordinates[axis] == 0 for axis in ("dp", "tp", "cp"))
        for name, buffer in model.named_buffers():
            if name in persistent:
                shape, write = tuple(buffer.shape), partial(_copy_into, buffer)
                yield _full_item(f"buffer.{name}", buffer.dtype, shape, is_writer, buffer.detach, write)


def _full_item(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    is_writer: bool,
    read: Callable[[], Tensor],
    write: Callable[[Tensor], None],
) -> StateItem:
    """A tensor that every rank of a stage holds in full, and that may change at any time."""
    local_slice = LocalSlice.full(shape)
    return StateItem(name, dtype, shape, local_slice, is_writer, _flattened(read), write, stable_until_update=False)


def _parameter_item(param_group: ParamGroup, piece: Piece) -> StateItem:
    where = slice(piece.shard_offset, piece.shard_offset + piece.stop - piece.start)
    dtype = param_group.master.dtype
    if not piece.param.trainable:  # in the compute dtype, which may change when a run resumes
        dtype = torch.promote_types(dtype, torch.float32)

    def read() -> Tensor:
        return param_group.master.values(where).to(dtype)

    @torch.no_grad()
    def write(values: Tensor) -> None:
        if len(values):
            param_group.master.set_values(piece.shard_offset, values)

    name, shape = f"model.{piece.param.name}", piece.param.shape
    is_writer = piece.is_owner and piece.is_first_replica
    return StateItem(name, dtype, shape, LocalSlice.from_piece(piece), is_writer, read, write)


def _optimizer_item(prefix: str, state: OptimizerState) -> StateItem:
    piece, name = state.piece, f"{prefix}.{state.piece.param.name}"
    is_writer = piece.is_owner and piece.is_first_replica
    shape, entry = piece.param.shape, piece.param
    if state.form == "elements":
        part, is_stable = LocalSlice.from_piece(piece), not state.param_group.states_on_disk
        return StateItem(name, state.dtype, shape, part, is_writer, state.read, state.write, is_stable)
    # Of the ranks that hold parts of a matrix, the one with its first element writes the states of the full matrix.
    inside = piece.box if state.form == "number" or entry.is_conv else piece.box[-2:]
    is_writer = is_writer and piece.start == 0 < piece.stop and all(low == 0 for low, _ in inside)
    read = _flattened(state.read)
    if state.form == "number":
        return StateItem(name, state.dtype, (), LocalSlice.full(()), is_writer, read, state.write)
    stack = matrix_stack(shape, filters=entry.is_conv)
    side = stack.rows if state.form == "rows" else stack.columns
    matrices = (0, 1) if entry.is_conv or len(shape) < 3 else _matrix_range(piece)
    part = LocalSlice.from_box((matrices, (0, side)))
    return StateItem(name, state.dtype, (stack.num_matrices, side), part, is_writer, read, state.write)


def _matrix_range(piece: Piece) -> tuple[int, int]:
    """Which matrices of a stack are in a rank's box: only the first dimension is sharded."""
    shape = piece.param.shape
    each = math.prod(shape[1:-2])
    low, high = piece.box[0]
    return low * each, high * each


def _flattened(read: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: read().reshape(-1)


@torch.no_grad()
def _copy_into(buffer: Tensor, values: Tensor) -> None:
    buffer.copy_(values.view(buffer.shape))
