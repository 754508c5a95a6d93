"""Muon (Jordan 2024): orthogonalized momentum.

    m = mu m + g                                  u = g + mu m      (Nesterov)
    o = the nearest orthogonal matrix to u, approximately: five Newton-Schulz steps
    w = w (1 - lr decay) - lr 0.2 sqrt(max(rows, columns)) o

The factor is Moonlight's (Liu et al. 2025, "Muon is Scalable for LLM Training"): the update is as large as AdamW's, so
one lr and one weight decay serve both. AdamW updates vectors, embeddings and the LM head.

[Note: gather once, owner computes]

Newton-Schulz needs the full matrix, which data and tensor parallelism have split. Each matrix (each expert of a stack)
has one owner among the ranks that hold its parts, chosen to balance the work. In one all-to-all every rank sends each
owner its parts of u, the owners compute, and a second all-to-all returns the parts of o:

    rank 0   parts of A B C D  --->  full A, B  --->  o of A, B  --->  parts of A B C D
    rank 1   parts of A B C D  --->  full C, D  --->  o of C, D  --->  parts of A B C D

A step takes two all-to-alls, and a rank sends what it holds once each way. Replicas all compute the same: zero=1
divides the work.

Newton-Schulz runs in bfloat16 on a GPU that trains in bfloat16, and in the master weights' dtype elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.layout.placement import Piece, Placement
from echelon.optim.cost import NEWTON_SCHULZ_STEPS
from echelon.optim.matrix_shards import MatrixRectangle
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState, element_state
from echelon.optim.param_shards import ParamShard, state_rectangle
from echelon.optim.update_rule import UpdateRule, resolve_momentum
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.dp import zero
from echelon.parallel.dp.data_parallel import placement_coordinates
from echelon.parallel.parallel_model import ParallelModel

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's: steep at 0, then between 0.7 and 1.2"""
UPDATE_SCALE = 0.2


def orthogonalize(u: Tensor) -> Tensor:
    """Return a matrix with the singular vectors of `u` and singular values of about 1."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    tall = u.shape[0] > u.shape[1]
    x: Tensor = u.T if tall else u
    x = x / (torch.linalg.vector_norm(x) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


@dataclass(frozen=True)
class OwnedMatrix:
    """One matrix, and the index of its owner among the ranks that share it."""

    shard: ParamShard
    matrix_index: int
    owner_index: int


class Muon(ShardedOptimizer):
    """Muon for matrices; `adamw` updates everything else."""

    def __init__(
        self, parallel: ParallelModel, shards: Sequence[ParamShard], rule: UpdateRule, adamw: ShardedOptimizer
    ):
        self._shards, self._momentum, self._adamw = shards, resolve_momentum(rule), adamw
        options = parallel.options
        use_bfloat16 = options.device.type == "cuda" and options.compute_dtype == torch.bfloat16
        dtype = torch.bfloat16 if use_bfloat16 else torch.promote_types(options.master_dtype, torch.float32)
        by_axis: dict[str, list[ParamShard]] = {}
        for shard in shards:
            by_axis.setdefault(shard.axis.name, []).append(shard)
        self._exchanges = [_MatrixExchange(parallel, by_axis[name], dtype) for name in sorted(by_axis)]
        self._momentum_buffers: dict[ParamShard, Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._init_state()
        for exchange in self._exchanges:
            # One at a time: an exchange takes as much memory as all parts of its matrices on this rank.
            exchange.gather_to_owners(
                [self._update_direction(matrix, part, grad_scale, do_update) for matrix, part in exchange.local_parts]
            )
            for (matrix, part), o in zip(exchange.local_parts, exchange.scatter_updates(), strict=True):
                shard, before = matrix.shard, matrix.shard.read_rectangle(part)
                size = UPDATE_SCALE * max(shard.stack.rows, shard.stack.columns) ** 0.5
                rate = lr * shard.lr_factor
                after = before * (1 - rate * shard.weight_decay) - o.to(before.dtype) * (rate * size)
                shard.write_rectangle(part, torch.where(do_update, after, before))
        self._adamw.step(lr, grad_scale, do_update)

    def _update_direction(
        self, matrix: OwnedMatrix, rectangle: MatrixRectangle, grad_scale: Tensor, do_update: Tensor
    ) -> Tensor:
        """Update the momentum; return u."""
        g = matrix.shard.scaled_gradient(rectangle, grad_scale)
        momentum = state_rectangle(self._momentum_buffers[matrix.shard], rectangle)
        momentum.copy_(torch.where(do_update, momentum * self._momentum + g, momentum))
        return g + momentum * self._momentum

    def _init_state(self) -> None:
        if not self._momentum_buffers:
            self._momentum_buffers = {shard: shard.zeros() for shard in self._shards}

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        yield from (
            element_state("momentum", shard.param_group, shard.piece, state)
            for shard, state in self._momentum_buffers.items()
        )
        yield from self._adamw.named_states()

    def states(self) -> list[Tensor]:
        return [*self._momentum_buffers.values(), *self._adamw.states()]

    def collectives(self) -> list[Collective]:
        return [collective for exchange in self._exchanges for collective in exchange.collectives()]


class _MatrixExchange:
    """The all-to-alls of the matrices that are split over one mesh axis."""

    def __init__(self, parallel: ParallelModel, shards: Sequence[ParamShard], dtype: torch.dtype):
        self._axis, self._dtype, self._device = shards[0].axis, dtype, parallel.options.device
        matrices = sorted(_assign_owners(shards, self._axis), key=lambda matrix: matrix.owner_index)
        self.local_parts = [
            (matrix, part)
            for matrix in matrices
            for part in matrix.shard.rectangles
            if part.matrix_index == matrix.matrix_index
        ]
        """this rank's parts in the order they are sent: owner by owner"""
        self._send_sizes = _sizes_by_owner(self.local_parts, self._axis.size, counted=True)
        """elements sent to each owner, without parts that a replica sends"""
        self._return_sizes = _sizes_by_owner(self.local_parts, self._axis.size, counted=False)
        self._owned = [matrix for matrix in matrices if matrix.owner_index == self._axis.index]
        self._parts: list[list[tuple[OwnedMatrix, Piece, MatrixRectangle]]] = [
            [
                (matrix, piece, part)
                for matrix in self._owned
                for piece in (placement.piece(matrix.shard.param_group.spec, matrix.shard.param),)
                for part in matrix.shard.rectangles_of(piece)
                if part.matrix_index == matrix.matrix_index
            ]
            for placement in (_placement_of_rank(parallel, rank) for rank in self._axis.ranks)
        ]
        """of the matrices that this rank owns, by rank"""
        self._gathered: dict[OwnedMatrix, Tensor] = {}

    def gather_to_owners(self, parts: Sequence[Tensor]) -> None:
        """Send this rank's parts to the owners, and assemble the matrices that this rank owns."""
        flat_parts = [
            part.reshape(-1).to(self._dtype)
            for (matrix, _), part in zip(self.local_parts, parts, strict=True)
            if matrix.shard.piece.counts_in_stage
        ]
        sizes = [
            sum(_numel(part) for _, piece, part in rank_parts if piece.counts_in_stage) for rank_parts in self._parts
        ]
        received = self._exchange(flat_parts, self._send_sizes, sizes)
        self._gathered = {
            matrix: self._empty(matrix.shard.stack.rows, matrix.shard.stack.columns) for matrix in self._owned
        }
        position = 0
        for rank_parts in self._parts:
            for matrix, piece, part in rank_parts:
                if piece.counts_in_stage:
                    values = received[position : position + _numel(part)].view(part.shape)
                    self._gathered[matrix][slice(*part.rows), slice(*part.columns)] = values[part.unpadded]
                    position += _numel(part)

    def scatter_updates(self) -> list[Tensor]:
        """Orthogonalize the owned matrices; return the updates of this rank's parts, with 0 in the padding."""
        updates = {matrix: orthogonalize(gathered) for matrix, gathered in self._gathered.items()}
        self._gathered = {}
        flat_parts = []
        for rank_parts in self._parts:
            for matrix, _, part in rank_parts:
                values = torch.zeros(part.shape, dtype=self._dtype, device=self._device)
                values[part.unpadded] = updates[matrix][slice(*part.rows), slice(*part.columns)]
                flat_parts.append(values.reshape(-1))
        sizes = [sum(_numel(part) for _, _, part in rank_parts) for rank_parts in self._parts]
        received = self._exchange(flat_parts, sizes, self._return_sizes)
        pieces = received.split([_numel(part) for _, part in self.local_parts])
        return [values.view(part.shape) for values, (_, part) in zip(pieces, self.local_parts, strict=True)]

    def _exchange(self, flat_parts: list[Tensor], send_sizes: list[int], receive_sizes: list[int]) -> Tensor:
        sent = torch.cat(flat_parts) if flat_parts else self._empty(0)
        if self._axis.size == 1:
            return sent
        received = self._empty(sum(receive_sizes))
        self._axis.start_all_to_all(received, sent, receive_sizes, send_sizes).wait()
        return received

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def collectives(self) -> list[Collective]:
        """Return the collectives, with the bytes that this rank sends."""
        if self._axis.size == 1:
            return []
        back = sum(_numel(part) for rank_parts in self._parts for _, _, part in rank_parts)
        return [
            Collective(op="all_to_all", axis=self._axis.name, bytes=size * self._dtype.itemsize, purpose=part)
            for size, part in ((sum(self._send_sizes), "momentum to the owners"), (back, "updates from the owners"))
        ]


def _numel(rectangle: MatrixRectangle) -> int:
    return rectangle.shape[0] * rectangle.shape[1]


def _sizes_by_owner(parts: Sequence[tuple[OwnedMatrix, MatrixRectangle]], ranks: int, *, counted: bool) -> list[int]:
    sizes = [0] * ranks
    for matrix, part in parts:
        if matrix.shard.piece.counts_in_stage or not counted:
            sizes[matrix.owner_index] += _numel(part)
    return sizes


def _assign_owners(shards: Sequence[ParamShard], axis: MeshAxis) -> list[OwnedMatrix]:
    """Assign an owner to every matrix: the largest first, each to the least loaded rank."""
    order = [(shard, matrix) for shard in shards for matrix in range(shard.stack.num_matrices)]
    work = [shard.stack.rows * shard.stack.columns * min(shard.stack.rows, shard.stack.columns) for shard, _ in order]
    loads, owners = [0] * axis.size, [0] * len(order)
    for index in sorted(range(len(order)), key=lambda index: -work[index]):
        owners[index] = min(range(axis.size), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += work[index]
    return [OwnedMatrix(shard, matrix, owner) for (shard, matrix), owner in zip(order, owners, strict=True)]


def _placement_of_rank(parallel: ParallelModel, rank: int) -> Placement:
    """Return the placement as another rank of the stage sees it."""
    experts = zero.expert_sharding_policy(parallel.layout, parallel.policy)
    at = placement_coordinates(parallel.axes, rank, parallel.policy, experts)
    return Placement(param_groups=parallel.placement.param_groups, coordinates=at)
