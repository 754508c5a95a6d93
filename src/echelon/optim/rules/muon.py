"""Muon (Jordan 2024): momentum, made orthogonal.

    m = mu m + g                                  u = g + mu m      (Nesterov)
    o = the nearest orthogonal matrix to u, nearly: five steps of Newton and Schulz
    w = w (1 - lr decay) - lr 0.2 sqrt(max(rows, columns)) o

The factor is Moonlight's (Liu et al. 2025, "Muon is Scalable for LLM Training"): the update is as large as AdamW's, so
one lr and one weight decay serve both. What is no matrix, the embedding and the head are AdamW's.

[Note: gather once, owner computes]

The steps need the whole matrix, and data and tensor parallelism have cut it. Each matrix (of a stack of experts, each)
has one owner among the ranks that hold its parts, chosen so that all have about as much to do. In one all-to-all every
rank sends each owner its parts of u, the owners compute, and in a second one the parts of o come back:

    rank 0   parts of A B C D  --->  A, B whole  --->  o of A, B  --->  parts of A B C D
    rank 1   parts of A B C D  --->  C, D whole  --->  o of C, D  --->  parts of A B C D

Two messages a step, and a rank sends what it holds, once each way. Replicas, which hold the same, all compute: zero=1
divides the work.

The steps run in bfloat16 on a GPU that trains in bfloat16, and in the master's type everywhere else.
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
"""of Jordan: steep at 0, and then between 0.7 and 1.2"""
UPDATE_SCALE = 0.2


def orthogonalize(u: Tensor) -> Tensor:
    """A matrix with the singular vectors of `u` and singular values of about 1."""
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
    """One matrix, and the place of its owner among the ranks that share it."""

    shard: ParamShard
    matrix_index: int
    owner_index: int


class Muon:
    """`beside` is the AdamW of everything else."""

    def __init__(
        self, parallel: ParallelModel, shards: Sequence[ParamShard], rule: UpdateRule, adamw: ShardedOptimizer
    ):
        self._shards, self._momentum, self._adamw = shards, resolve_momentum(rule), adamw
        options = parallel.options
        narrow = options.device.type == "cuda" and options.compute_dtype == torch.bfloat16
        self._dtype = torch.bfloat16 if narrow else torch.promote_types(options.master_dtype, torch.float32)
        together: dict[str, list[ParamShard]] = {}
        for one in shards:
            together.setdefault(one.axis.name, []).append(one)
        self._exchanges = [_MatrixExchange(parallel, together[name], self._dtype) for name in sorted(together)]
        self._momentum_buffers: dict[ParamShard, Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._init_state()
        for exchange in self._exchanges:
            # One after another: what is on its way is as large as all matrices' parts on this rank.
            exchange.gather_to_owners(
                [self._update_direction(task, part, grad_scale, do_update) for task, part in exchange.local_parts]
            )
            for (task, part), o in zip(exchange.local_parts, exchange.scatter_updates(), strict=True):
                one, before = task.shard, task.shard.read_rectangle(part)
                size = UPDATE_SCALE * max(one.stack.rows, one.stack.columns) ** 0.5
                rate = lr * one.lr_factor
                after = before * (1 - rate * one.weight_decay) - o.to(before.dtype) * (rate * size)
                one.write_rectangle(part, torch.where(do_update, after, before))
        self._adamw.step(lr, grad_scale, do_update)

    def _update_direction(self, task: OwnedMatrix, part: MatrixRectangle, scale: Tensor, live: Tensor) -> Tensor:
        """u, with the new momentum."""
        g, moment = task.shard.scaled_gradient(part, scale), state_rectangle(self._momentum_buffers[task.shard], part)
        moment.copy_(torch.where(live, moment * self._momentum + g, moment))
        return g + moment * self._momentum

    def _init_state(self) -> None:
        if not self._momentum_buffers:
            self._momentum_buffers = {one: one.zeros() for one in self._shards}

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        yield from (
            element_state("momentum", one.param_group, one.piece, state)
            for one, state in self._momentum_buffers.items()
        )
        yield from self._adamw.named_states()

    def states(self) -> list[Tensor]:
        return [*self._momentum_buffers.values(), *self._adamw.states()]

    def collectives(self) -> list[Collective]:
        return [*(found for exchange in self._exchanges for found in exchange.collectives())]


class _MatrixExchange:
    """The matrices whose parts lie on one axis: parts to the owners, and back."""

    def __init__(self, parallel: ParallelModel, shards: Sequence[ParamShard], dtype: torch.dtype):
        self._axis, self._dtype = shards[0].axis, dtype
        self._device = parallel.options.device
        self._matrices = _assign_owners(shards, self._axis)
        places = [_placement_of_rank(parallel, rank) for rank in self._axis.ranks]
        me = self._axis.index
        self.local_parts = [
            (task, part)
            for owner in range(self._axis.size)
            for task in self._matrices
            if task.owner_index == owner
            for part in task.shard.rectangles
            if part.matrix_index == task.matrix_index
        ]
        """this rank's parts in the order in which they are sent: owner by owner"""
        self._send_sizes = _sizes_by_owner(self.local_parts, self._axis.size, counted=True)
        """elements that go to each owner; copies of parts that somebody else sends too do not"""
        self._return_sizes = _sizes_by_owner(self.local_parts, self._axis.size, counted=False)
        owned = [task for task in self._matrices if task.owner_index == me]
        self._parts: list[list[tuple[OwnedMatrix, Piece, MatrixRectangle]]] = [
            [
                (task, piece, part)
                for task in owned
                for piece in (there.piece(task.shard.param_group.spec, task.shard.entry),)
                for part in task.shard.rectangles_of(piece)
                if part.matrix_index == task.matrix_index
            ]
            for there in places
        ]
        """of the matrices that this rank owns, on every rank"""
        self._owned = owned
        self._gathered: dict[OwnedMatrix, Tensor] = {}

    def gather_to_owners(self, parts: Sequence[Tensor]) -> None:
        """This rank's parts; when it is through the matrices of this rank are whole."""
        chosen = [
            part.reshape(-1).to(self._dtype)
            for (task, _), part in zip(self.local_parts, parts, strict=True)
            if task.shard.piece.counts_in_stage
        ]
        sent = torch.cat(chosen) if chosen else self._empty(0)
        sizes = [sum(_numel(part) for _, piece, part in found if piece.counts_in_stage) for found in self._parts]
        received = self._exchange(sent, self._send_sizes, sizes)
        self._gathered = {task: self._empty(task.shard.stack.rows, task.shard.stack.columns) for task in self._owned}
        position = 0
        for found in self._parts:
            for task, piece, part in found:
                if piece.counts_in_stage:
                    values = received[position : position + _numel(part)].view(part.shape)
                    self._gathered[task][slice(*part.rows), slice(*part.columns)] = values[part.unpadded]
                    position += _numel(part)

    def scatter_updates(self) -> list[Tensor]:
        """Of this rank's parts, what is made of them; padding is 0."""
        made = {task: orthogonalize(whole) for task, whole in self._gathered.items()}
        self._gathered = {}
        chosen = []
        for found in self._parts:
            for task, _, part in found:
                values = torch.zeros(part.shape, dtype=self._dtype, device=self._device)
                values[part.unpadded] = made[task][slice(*part.rows), slice(*part.columns)]
                chosen.append(values.reshape(-1))
        sent = torch.cat(chosen) if chosen else self._empty(0)
        sizes = [sum(_numel(part) for _, _, part in found) for found in self._parts]
        received = self._exchange(sent, sizes, self._return_sizes)
        pieces = received.split([_numel(part) for _, part in self.local_parts])
        return [values.view(part.shape) for values, (_, part) in zip(pieces, self.local_parts, strict=True)]

    def _exchange(self, sent: Tensor, to: list[int], come: list[int]) -> Tensor:
        if self._axis.size == 1:
            return sent
        received = self._empty(sum(come))
        self._axis.start_all_to_all(received, sent, come, to).wait()
        return received

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def collectives(self) -> list[Collective]:
        """By what this rank sends."""
        if self._axis.size == 1:
            return []
        back = sum(_numel(part) for found in self._parts for _, _, part in found)
        return [
            Collective(op="all_to_all", axis=self._axis.name, bytes=size * self._dtype.itemsize, purpose=part)
            for size, part in ((sum(self._send_sizes), "momentum to the owners"), (back, "updates from the owners"))
        ]


def _numel(part: MatrixRectangle) -> int:
    return part.shape[0] * part.shape[1]


def _sizes_by_owner(mine: Sequence[tuple[OwnedMatrix, MatrixRectangle]], ranks: int, *, counted: bool) -> list[int]:
    sizes = [0] * ranks
    for task, part in mine:
        if task.shard.piece.counts_in_stage or not counted:
            sizes[task.owner_index] += _numel(part)
    return sizes


def _assign_owners(held: Sequence[ParamShard], axis: MeshAxis) -> list[OwnedMatrix]:
    """Every matrix with its owner: the largest first, each to who has least to do."""
    order = [(one, matrix) for one in held for matrix in range(one.stack.num_matrices)]
    work = [one.stack.rows * one.stack.columns * min(one.stack.rows, one.stack.columns) for one, _ in order]
    loads, owners = [0] * axis.size, [0] * len(order)
    for index in sorted(range(len(order)), key=lambda index: -work[index]):
        owners[index] = min(range(axis.size), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += work[index]
    return [OwnedMatrix(one, matrix, owner) for (one, matrix), owner in zip(order, owners, strict=True)]


def _placement_of_rank(parallel: ParallelModel, rank: int) -> Placement:
    """The record as another rank of the stage sees it."""
    experts = zero.expert_sharding_policy(parallel.layout, parallel.policy)
    at = placement_coordinates(parallel.axes, rank, parallel.policy, experts)
    return Placement(param_groups=parallel.placement.param_groups, coordinates=at)
