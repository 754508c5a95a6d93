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
from echelon.optim.matrix_shards import Rectangle
from echelon.optim.optimizer_protocol import Update
from echelon.optim.optimizer_state import Kept, elements
from echelon.optim.param_shards import Held, of
from echelon.optim.update_rule import Rule, momentum_of
from echelon.parallel.apply import Parallel, coordinates
from echelon.parallel.comm.mesh_axis import Axis
from echelon.parallel.dp import zero

STEPS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)
"""of Jordan: steep at 0, and then between 0.7 and 1.2"""
SIZE = 0.2


def orthogonal(u: Tensor) -> Tensor:
    """A matrix with the singular vectors of `u` and singular values of about 1."""
    a, b, c = QUINTIC
    tall = u.shape[0] > u.shape[1]
    x: Tensor = u.T if tall else u
    x = x / (torch.linalg.vector_norm(x) + 1e-7)
    for _ in range(STEPS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


@dataclass(frozen=True)
class Task:
    """One matrix, and the place of its owner among the ranks that share it."""

    held: Held
    matrix: int
    owner: int


class Muon:
    """`beside` is the AdamW of everything else."""

    def __init__(self, parallel: Parallel, held: Sequence[Held], rule: Rule, beside: Update):
        self._held, self._momentum, self._beside = held, momentum_of(rule), beside
        options = parallel.options
        narrow = options.device.type == "cuda" and options.compute == torch.bfloat16
        self._dtype = torch.bfloat16 if narrow else torch.promote_types(options.master, torch.float32)
        together: dict[str, list[Held]] = {}
        for one in held:
            together.setdefault(one.axis.name, []).append(one)
        self._exchanges = [_Exchange(parallel, together[name], self._dtype) for name in sorted(together)]
        self._moments: dict[Held, Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        self._begin()
        for exchange in self._exchanges:
            # One after another: what is on its way is as large as all matrices' parts on this rank.
            exchange.send([self._towards(task, part, scale, live) for task, part in exchange.mine])
            for (task, part), o in zip(exchange.mine, exchange.back(), strict=True):
                one, before = task.held, task.held.values(part)
                size = SIZE * max(one.stack.rows, one.stack.columns) ** 0.5
                rate = lr * one.lr
                after = before * (1 - rate * one.decay) - o.to(before.dtype) * (rate * size)
                one.set(part, torch.where(live, after, before))
        self._beside.step(lr, scale, live)

    def _towards(self, task: Task, part: Rectangle, scale: Tensor, live: Tensor) -> Tensor:
        """u, with the new momentum."""
        g, moment = task.held.gradient(part, scale), of(self._moments[task.held], part)
        moment.copy_(torch.where(live, moment * self._momentum + g, moment))
        return g + moment * self._momentum

    def _begin(self) -> None:
        if not self._moments:
            self._moments = {one: one.zeros() for one in self._held}

    def kept(self) -> Iterator[Kept]:
        self._begin()
        yield from (elements("momentum", one.unit, one.piece, state) for one, state in self._moments.items())
        yield from self._beside.kept()

    def states(self) -> list[Tensor]:
        return [*self._moments.values(), *self._beside.states()]

    def collectives(self) -> list[Collective]:
        return [*(found for exchange in self._exchanges for found in exchange.collectives())]


class _Exchange:
    """The matrices whose parts lie on one axis: parts to the owners, and back."""

    def __init__(self, parallel: Parallel, held: Sequence[Held], dtype: torch.dtype):
        self._axis, self._dtype = held[0].axis, dtype
        self._device = parallel.options.device
        self._tasks = _tasks(held, self._axis)
        places = [_placement(parallel, rank) for rank in self._axis.ranks]
        me = self._axis.index
        self.mine = [
            (task, part)
            for owner in range(self._axis.size)
            for task in self._tasks
            if task.owner == owner
            for part in task.held.parts
            if part.matrix == task.matrix
        ]
        """this rank's parts in the order in which they are sent: owner by owner"""
        self._to = _sizes(self.mine, self._axis.size, counted=True)
        """elements that go to each owner; copies of parts that somebody else sends too do not"""
        self._return_to_me = _sizes(self.mine, self._axis.size, counted=False)
        owned = [task for task in self._tasks if task.owner == me]
        self._parts: list[list[tuple[Task, Piece, Rectangle]]] = [
            [
                (task, piece, part)
                for task in owned
                for piece in (there.piece(task.held.unit.unit, task.held.entry),)
                for part in task.held.parts_of(piece)
                if part.matrix == task.matrix
            ]
            for there in places
        ]
        """of the matrices that this rank owns, on every rank"""
        self._owned = owned
        self._whole: dict[Task, Tensor] = {}

    def send(self, parts: Sequence[Tensor]) -> None:
        """This rank's parts; when it is through the matrices of this rank are whole."""
        chosen = [
            part.reshape(-1).to(self._dtype)
            for (task, _), part in zip(self.mine, parts, strict=True)
            if task.held.piece.counts
        ]
        sent = torch.cat(chosen) if chosen else self._empty(0)
        sizes = [sum(_area(part) for _, piece, part in found if piece.counts) for found in self._parts]
        received = self._exchange(sent, self._to, sizes)
        self._whole = {task: self._empty(task.held.stack.rows, task.held.stack.columns) for task in self._owned}
        position = 0
        for found in self._parts:
            for task, piece, part in found:
                if piece.counts:
                    values = received[position : position + _area(part)].view(part.shape)
                    self._whole[task][slice(*part.rows), slice(*part.columns)] = values[part.real]
                    position += _area(part)

    def back(self) -> list[Tensor]:
        """Of this rank's parts, what is made of them; padding is 0."""
        made = {task: orthogonal(whole) for task, whole in self._whole.items()}
        self._whole = {}
        chosen = []
        for found in self._parts:
            for task, _, part in found:
                values = torch.zeros(part.shape, dtype=self._dtype, device=self._device)
                values[part.real] = made[task][slice(*part.rows), slice(*part.columns)]
                chosen.append(values.reshape(-1))
        sent = torch.cat(chosen) if chosen else self._empty(0)
        sizes = [sum(_area(part) for _, _, part in found) for found in self._parts]
        received = self._exchange(sent, sizes, self._return_to_me)
        pieces = received.split([_area(part) for _, part in self.mine])
        return [values.view(part.shape) for values, (_, part) in zip(pieces, self.mine, strict=True)]

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
        back = sum(_area(part) for found in self._parts for _, _, part in found)
        return [
            Collective(kind="all_to_all", axis=self._axis.name, bytes=size * self._dtype.itemsize, part=part)
            for size, part in ((sum(self._to), "momentum to the owners"), (back, "updates from the owners"))
        ]


def _area(part: Rectangle) -> int:
    return part.shape[0] * part.shape[1]


def _sizes(mine: Sequence[tuple[Task, Rectangle]], ranks: int, *, counted: bool) -> list[int]:
    sizes = [0] * ranks
    for task, part in mine:
        if task.held.piece.counts or not counted:
            sizes[task.owner] += _area(part)
    return sizes


def _tasks(held: Sequence[Held], axis: Axis) -> list[Task]:
    """Every matrix with its owner: the largest first, each to who has least to do."""
    order = [(one, matrix) for one in held for matrix in range(one.stack.matrices)]
    work = [one.stack.rows * one.stack.columns * min(one.stack.rows, one.stack.columns) for one, _ in order]
    loads, owners = [0] * axis.size, [0] * len(order)
    for index in sorted(range(len(order)), key=lambda index: -work[index]):
        owners[index] = min(range(axis.size), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += work[index]
    return [Task(one, matrix, owner) for (one, matrix), owner in zip(order, owners, strict=True)]


def _placement(parallel: Parallel, rank: int) -> Placement:
    """The record as another rank of the stage sees it."""
    experts = zero.experts_policy(parallel.layout, parallel.policy)
    at = coordinates(parallel.axes, rank, parallel.policy, experts)
    return Placement(units=parallel.placement.units, at=at)
