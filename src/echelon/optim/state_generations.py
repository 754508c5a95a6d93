"""Generations of states on disk: space is reserved, and the groups of a step are committed together or not at all.

Without a disk there is nothing to do here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from echelon.memory.offload.disk_store import DiskError, DiskStore
from echelon.parallel.dp.offloaded_param_group import OffloadedParamGroup


def reserve_disk(groups: Sequence[OffloadedParamGroup], state_bytes: Callable[[OffloadedParamGroup], int]) -> None:
    """Reserve the disk space of all states, so that a disk that is too small fails now."""
    disk = groups[0].host.disk if groups else None
    if disk is None:
        return
    needed = {group: group.spec.shard_numel * group.states.master.itemsize + state_bytes(group) for group in groups}
    reserved = sum(group.states.store.reserved for group in groups if group.states.store is not None)
    try:
        disk.check_free_space(2 * sum(needed.values()) - 2 * reserved)
        for group, nbytes in needed.items():
            assert group.states.store is not None
            group.states.store.reserve(nbytes)
    except DiskError:
        disk.close()  # releases what was reserved
        raise


def commit(groups: Sequence[OffloadedParamGroup]) -> None:
    """Make what was written the current generation."""
    for store in _stores(groups):
        store.commit()


@contextmanager
def rolled_back_on_error(groups: Sequence[OffloadedParamGroup]) -> Iterator[None]:
    """Return the stores to the previous step where the body fails."""
    try:
        yield
    except BaseException as error:
        roll_back(groups, error)
        raise


def roll_back(groups: Sequence[OffloadedParamGroup], error: BaseException) -> None:
    """Return the stores on disk to the previous step; no write may be running."""
    if (disk := groups[0].host.disk) is None:
        return
    disk.errors.append(error)
    for store in _stores(groups):
        store.roll_back()


def _stores(groups: Sequence[OffloadedParamGroup]) -> list[DiskStore]:
    return [store for group in groups for store in (group.states.store, group.params.store) if store is not None]
