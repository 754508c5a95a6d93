"""`MeshAxis`: the ranks of a mesh axis as a process group, and all collectives between them."""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from echelon import compat
from echelon.faults import flight_recorder
from echelon.faults.flight_recorder import FlightRecorder, OperationSequence, RecordedWork, Waitable
from echelon.layout import Mesh

flight_recorder.hide_call_sites_in(__file__)


class CompletedWork:
    """The handle of a collective that had nothing to do."""

    def wait(self) -> None:
        return None


class BatchedWork:
    """The handle of several p2p operations."""

    def __init__(self, works: Sequence[dist.Work]):
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


PendingWork = CompletedWork | RecordedWork
Splits = list[int] | None
"""rows of each rank's slice"""


class MeshAxis:
    """One rank's view of one mesh axis. On an axis of one rank every collective is a no-op."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        dropped_ops: frozenset[str] = frozenset(),
        make_group: Callable[[], dist.ProcessGroup | None] | None = None,
        sequence: OperationSequence | None = None,
        label: str = "",
        recorder: FlightRecorder | None = None,
    ):
        self.name = name
        self.label = label or name
        """the name of the axis in reports"""
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.index = self.ranks.index(rank)
        self.group = group
        self.dropped_ops = dropped_ops
        self.make_group = make_group
        self.sequence = sequence or OperationSequence(name, ranks)
        self.recorder = recorder or FlightRecorder()
        self.dropped_any = False
        """a collective was dropped on purpose"""

    def __repr__(self) -> str:
        return f"MeshAxis({self.name}, {self.index} of {self.size})"

    def is_idle(self, op: str) -> bool:
        """Return whether to skip a collective: the axis has one rank, or a test drops it on purpose."""
        if self.size == 1:
            return True
        is_dropped = op in self.dropped_ops
        if self.recorder.should_skip is not None:
            is_dropped |= self.recorder.should_skip(self.recorder.step, op, self.label)
        self.dropped_any |= is_dropped
        return is_dropped

    def _record(
        self, op: str, tensor: Tensor, start: Callable[[], Waitable], *, sends: Tensor, receives: Tensor
    ) -> PendingWork:
        """Start an operation, and record it (faults/flight_recorder.py)."""
        recorder = self.recorder
        slot = recorder.record_start(op, self.label, self.sequence, tensor.shape, tensor.dtype)
        if recorder.on_send is not None:
            recorder.on_send(op, self.label, sends)
        received = (op, self.label, receives) if recorder.on_receive is not None else None
        return RecordedWork(recorder, slot, start(), tensor.is_cuda, received)

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        """Sum, or take the maximum, in place."""
        self.start_all_reduce(tensor, op=op).wait()
        return tensor

    def start_all_reduce(self, tensor: Tensor, *, op: str = "sum") -> PendingWork:
        if self.is_idle("all_reduce"):
            return CompletedWork()
        reduce = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        start = partial(dist.all_reduce, tensor, op=reduce, group=self.group, async_op=True)
        return self._record("all_reduce", tensor, start, sends=tensor, receives=tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's tensor, [ranks, *tensor.shape], in the order of the axis."""
        gathered = tensor.new_empty(self.size, *tensor.shape)
        self.start_all_gather(gathered.view(-1), tensor.reshape(-1)).wait()
        return gathered

    def start_all_gather(self, full: Tensor, shard: Tensor) -> PendingWork:
        """Gather every rank's `shard` into `full`, in the order of the axis; `shard` may be its slice of `full`."""
        if self.is_idle("all_gather"):
            local = shard.clone() if self.size > 1 else shard
            own_slice = full.narrow(0, self.index * shard.shape[0], shard.shape[0])
            if self.size > 1:
                full.zero_()  # dropped on purpose: the other ranks' shards are missing, deterministically
            if own_slice.data_ptr() != local.data_ptr():
                own_slice.copy_(local)
            return CompletedWork()
        start = partial(compat.start_all_gather, full, shard, self.group)
        return self._record("all_gather", full, start, sends=shard, receives=full)

    def start_reduce_scatter(self, shard: Tensor, full: Tensor) -> PendingWork:
        """Reduce all ranks' `full` and write this rank's slice to `shard`, which may be that slice of `full`."""
        if self.is_idle("reduce_scatter"):
            own_slice = full.narrow(0, self.index * shard.shape[0], shard.shape[0])
            if own_slice.data_ptr() != shard.data_ptr():
                shard.copy_(own_slice)
            return CompletedWork()
        start = partial(compat.start_reduce_scatter, shard, full, self.group)
        return self._record("reduce_scatter", full, start, sends=full, receives=shard)

    def new_process_group(self) -> dist.ProcessGroup | None:
        """Create a second process group of the same ranks. All ranks of the mesh must call it."""
        return None if self.make_group is None else self.make_group()

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Send the first rank's values to all ranks."""
        self.start_broadcast(tensor, 0).wait()
        return tensor

    def start_broadcast(self, tensor: Tensor, source: int) -> PendingWork:
        """Send the values of the rank at index `source` to all ranks."""
        if self.is_idle("broadcast"):
            if self.index != source:
                tensor.zero_()  # dropped on purpose: the source's values are missing
            return CompletedWork()
        sends = tensor if self.index == source else tensor.new_empty(0)
        start = partial(dist.broadcast, tensor, src=self.ranks[source], group=self.group, async_op=True)
        return self._record("broadcast", tensor, start, sends=sends, receives=tensor)

    def start_reduce(self, tensor: Tensor, target: int) -> PendingWork:
        """Reduce to the rank at index `target`; the other ranks' values are then undefined."""
        if self.is_idle("reduce"):
            return CompletedWork()
        receives = tensor if self.index == target else tensor.new_empty(0)
        start = partial(dist.reduce, tensor, dst=self.ranks[target], group=self.group, async_op=True)
        return self._record("reduce", tensor, start, sends=tensor, receives=receives)

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: Splits = None, sent_splits: Splits = None
    ) -> PendingWork:
        """Send slice i of `sent` to rank i, and receive its slice at the same place of `received`.

        Slices are of equal size, or of the given splits of dimension 0.
        """
        if self.is_idle("all_to_all"):
            received.zero_() if received.shape != sent.shape else received.copy_(sent)
            return CompletedWork()
        splits = (received_splits, sent_splits)
        start = partial(dist.all_to_all_single, received, sent, *splits, group=self.group, async_op=True)
        return self._record("all_to_all", sent, start, sends=sent, receives=received)

    def start_shift(self, received: Tensor, sent: Tensor, offset: int = 1) -> PendingWork:
        """Send to the rank `offset` further on the axis, cyclically, and receive from the rank `offset` before.

        An empty tensor is not sent: both of its ranks must know.
        """
        if self.is_idle("send"):
            received.zero_() if received.shape != sent.shape else received.copy_(sent)
            return CompletedWork()
        to, source = (self.ranks[(self.index + step) % self.size] for step in (offset, -offset))
        ops = [dist.P2POp(dist.isend, sent, to, group=self.group)] if sent.numel() else []
        ops += [dist.P2POp(dist.irecv, received, source, group=self.group)] if received.numel() else []
        if not ops:
            return CompletedWork()
        return self._record(
            "shift", sent, lambda: BatchedWork(dist.batch_isend_irecv(ops)), sends=sent, receives=received
        )


SINGLE_RANK = "alone"
"""the name of the axis of one rank"""
RankGroups = tuple[tuple[int, ...], ...]
"""all groups of an axis: the ranks of each"""

_live: weakref.WeakSet[MeshAxes] = weakref.WeakSet()


@atexit.register
def _release_all() -> None:
    """Release process groups before the interpreter ends: destroying one later aborts the process."""
    for axes in list(_live):
        axes.release()
    gc.collect()


class MeshAxes:
    """Every axis of a mesh as one rank sees it; all ranks create the process groups in the same order.

    Names are those of the mesh (`tp`, `shard`, `replica`, `dp`, ...), products of them joined by `*` (`shard*tp`),
    `tp/2` for the groups of two neighbours inside tp, `tp%2` for those at the same index in such groups, and `pp[0+3]`
    for the ranks at indices 0 and 3 of pp, which hold copies of a tied weight.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        names: Sequence[str],
        *,
        drop_collective: str = "",
        recorder: FlightRecorder | None = None,
    ):
        self.mesh = mesh
        self.recorder = recorder or FlightRecorder()
        """records every collective and p2p transfer of this rank; private to these axes unless the caller gives one"""
        self.rank = rank
        self.coordinates = mesh.coordinates(rank)
        self._dropped_axis, _, self._dropped_op = drop_collective.partition(":")
        self._axes: dict[str, MeshAxis] = {}
        self._process_groups: dict[RankGroups, dist.ProcessGroup | None] = {}
        self._sequences: dict[RankGroups, OperationSequence] = {}
        for name in names:
            self.add(name)
        _live.add(self)

    def release(self) -> None:
        self._process_groups.clear()
        for axis in self._axes.values():
            axis.group = axis.make_group = None

    def __getitem__(self, name: str) -> MeshAxis:
        return self._axes[name]

    def get_or_add(self, name: str) -> MeshAxis:
        """Return an axis; create it if it is missing. `SINGLE_RANK` is this rank alone."""
        if name == SINGLE_RANK:
            return MeshAxis(SINGLE_RANK, (self.rank,), self.rank, None, recorder=self.recorder)
        self.add(name)
        return self[name]

    @property
    def dropped_any(self) -> bool:
        """A collective was dropped on purpose, on some axis."""
        return any(axis.dropped_any for axis in self._axes.values())

    def add(self, name: str) -> None:
        """Create an axis. All ranks must add the same names in the same order."""
        if name in self._axes:
            return
        groups = enumerate_groups(self.mesh, name)
        ranks = next(group for group in groups if self.rank in group)
        if groups not in self._process_groups:
            self._process_groups[groups] = self._find_process_group(groups)
            self._sequences[groups] = self.recorder.new_sequence(ranks)
        is_all_of_dp = name in ("replica", "shard") and self.mesh.size(name) == self.mesh.size("dp")
        self._axes[name] = MeshAxis(
            name,
            ranks,
            self.rank,
            self._process_groups[groups],
            dropped_ops=frozenset({self._dropped_op} if name == self._dropped_axis else ()),
            make_group=partial(self._new_process_group, groups),
            sequence=self._sequences[groups],
            label="dp" if is_all_of_dp else name,
            recorder=self.recorder,
        )

    def _find_process_group(self, groups: RankGroups) -> dist.ProcessGroup | None:
        if all(len(group) == 1 for group in groups):
            return None
        return dist.group.WORLD if len(groups) == 1 else self._new_process_group(groups)

    def _new_process_group(self, groups: RankGroups) -> dist.ProcessGroup | None:
        mine: dist.ProcessGroup | None = None
        for ranks in (several for several in groups if len(several) > 1):  # by every rank, member or not
            group = dist.new_group(list(ranks))
            if self.rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                mine = group
        return mine


def enumerate_groups(mesh: Mesh, name: str) -> RankGroups:
    """Return all groups of an axis, a product of axes (`shard*tp`), neighbours (`tp/2`), and so on."""
    if "[" in name:
        axis, _, listed = name.rstrip("]").partition("[")
        indices = [int(index) for index in listed.split("+")]
        groups: list[tuple[int, ...]] = []
        for ranks in mesh.groups(axis):
            groups.append(tuple(ranks[index] for index in indices))
            groups += [(rank,) for index, rank in enumerate(ranks) if index not in indices]
        return tuple(groups)
    if "/" in name:
        axis, _, size = name.partition("/")
        return tuple(g[i : i + int(size)] for g in enumerate_groups(mesh, axis) for i in range(0, len(g), int(size)))
    if "%" in name:
        axis, _, size = name.partition("%")
        return tuple(g[i :: int(size)] for g in enumerate_groups(mesh, axis) for i in range(int(size)))
    parts = tuple(name.split("*"))
    return tuple(tuple(group) for group in mesh.groups(parts if len(parts) > 1 else parts[0]))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def world_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@torch.no_grad()
def all_reduce_coalesced(axis: MeshAxis, tensors: Sequence[Tensor]) -> None:
    """Sum many small flat tensors over an axis with one all-reduce, in place."""
    if axis.size == 1 or not tensors:
        return
    sums = axis.all_reduce(torch.cat(list(tensors))).split([tensor.numel() for tensor in tensors])
    for tensor, summed in zip(tensors, sums, strict=True):
        tensor.copy_(summed)
