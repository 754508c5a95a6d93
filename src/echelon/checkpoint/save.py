"""Saving: a copy, files and check sums in the background, and one move that makes the checkpoint exist.

[Note: a save]

    1  all ranks    copy their parts to host memory (staging.py)                     before the next update
    2  first rank   makes the folder `.writing-step-…`, tells the others
    3  all ranks    write and flush their file, and take its check sums
    4  first rank   gathers what is in the files, writes the index, and renames the folder: the checkpoint exists
    5  first rank   removes checkpoints that are not to be kept, tells the others how it went

All of it is done by threads beside training.

A save waits for the one before it. What goes wrong is raised when training next asks (`check`, `save`, `wait`); the
folder is removed, and checkpoints before it are as they were.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from echelon.checkpoint.checkpoint_index import (
    DIGEST_FILE,
    INDEX_FILE,
    CheckpointError,
    CheckpointIndex,
    FileRecord,
    FileRegion,
    StoredSlice,
    TensorRecord,
    digest_line,
)
from echelon.checkpoint.checksums import Checksum, add_checksums, state_hash
from echelon.checkpoint.coordination import CheckpointGroup, raise_on_all_ranks
from echelon.checkpoint.staging import HostStaging
from echelon.checkpoint.storage import Storage, step_dir_name
from echelon.checkpoint.training_state import TrainingState

FAILURE_GRACE_S = 3.0
"""seconds that a failing run gives to a save under way"""


@dataclass(frozen=True)
class WrittenFile:
    """What a rank has written."""

    file: str
    nbytes: int
    header: str
    tensors_offset: int
    """byte of the file where tensors begin"""
    regions: Sequence[FileRegion]
    checksums: Sequence[Checksum]


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Which checkpoints stay."""

    last: int = 2
    """the newest so many; 0 keeps all"""
    every: int = 0
    """and those of steps that this divides; 0: none"""

    def expired(self, steps: Sequence[int]) -> list[int]:
        """Of some checkpoints' steps in order, those that go."""
        old = steps[: -self.last] if self.last else []
        return [step for step in old if not (self.every and step % self.every == 0)]


class CheckpointSaver:
    """One rank's part in all saves of a run. Every rank makes one and calls its methods alike."""

    def __init__(
        self,
        state: TrainingState,
        storage: Storage,
        group: CheckpointGroup,
        *,
        device: torch.device,
        retention: RetentionPolicy | None = None,
    ):
        self._state, self._storage, self._group = state, storage, group
        self._retention = retention or RetentionPolicy()
        self._staging = HostStaging(state, device)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.last_address: str | None = None
        """address of the newest checkpoint that exists"""
        self.hash = ""
        """of its state"""

    @property
    def nbytes(self) -> int:
        """of this rank's file"""
        return self._staging.nbytes

    def save(self, step: int, metadata: Mapping[str, Any], *, in_background: bool = False) -> None:
        """Of the state as it is now; the checkpoint exists some time later.

        The state may change when this returns; with `behind`, when `settle` does.
        """
        self.wait()
        self._staging.snapshot(self._state, in_background=in_background)
        threading.Thread(target=self._staging.run_background_copies, name="echelon-copy", daemon=True).start()
        self._thread = threading.Thread(
            target=self._save_in_thread, args=(step, dict(metadata)), name="echelon-save", daemon=True
        )
        self._thread.start()

    def wait_before_update(self) -> None:
        """Until the state may change."""
        self._staging.wait_before_update()

    def check(self) -> None:
        """Raises what went wrong in the background, if it is over."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Until nothing is under way; raises what went wrong."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> bool:
        """After the last save, or after a failure elsewhere: a save under way gets a moment. True if nothing is left.

        Where another rank hangs, its part would never come, and what went wrong there is to be told now.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(FAILURE_GRACE_S)
        return thread is None or not thread.is_alive()

    def _save_in_thread(self, step: int, facts: dict[str, Any]) -> None:
        try:
            self.hash = self._write(step, facts)
            self.last_address = f"{self._storage.address}/{step_dir_name(step)}"
        except BaseException as error:  # raised where training next asks
            self._error = error

    def _write(self, step: int, facts: dict[str, Any]) -> str:
        together, error = self._group, None
        if together.is_rank_zero:
            error = _catch_error(lambda: self._storage.begin(step))
        raise_on_all_ranks(together, error)
        written: WrittenFile | None = None

        def write() -> None:
            nonlocal written
            written = self._write_part(step)

        error = _catch_error(write)
        try:
            raise_on_all_ranks(together, error)
            every = together.gather(written)
            index: CheckpointIndex | None = None
            if together.is_rank_zero:
                try:
                    index = build_index(step, facts, [one for one in every if one is not None])
                    self._commit(index)
                except Exception as found:
                    error = found
            raise_on_all_ranks(together, error)
            return together.broadcast("" if index is None else index.hash)
        except BaseException:
            if together.is_rank_zero:
                self._storage.abandon(step)
            raise

    def _write_part(self, step: int) -> WrittenFile:
        staging = self._staging
        sums: list[Checksum] = []
        wrong: list[BaseException] = []

        def add() -> None:
            try:
                sums.extend(staging.checksums())
            except BaseException as error:
                wrong.append(error)

        adding = threading.Thread(target=add, name="echelon-sums", daemon=True)
        adding.start()
        name = f"part-{self._group.rank:05d}.safetensors"
        try:
            self._storage.write(step, name, staging.file_view(), staging.wait_for_bytes)
        finally:
            adding.join()
        if wrong:
            raise wrong[0]
        header = hashlib.sha256(staging.header).hexdigest()
        return WrittenFile(name, staging.nbytes, header, len(staging.header), staging.regions, sums)

    def _commit(self, index: CheckpointIndex) -> None:
        index.check_complete()
        text, step, storage = index.to_json(), index.step, self._storage
        storage.write(step, DIGEST_FILE, digest_line(text).encode())
        storage.write(step, INDEX_FILE, text.encode())
        storage.commit(step)
        for old in self._retention.expired([found for found in storage.steps() if found <= step]):
            storage.remove(old)


def _catch_error(job: Callable[[], None]) -> Exception | None:
    try:
        job()
    except Exception as error:
        return error
    return None


def build_index(step: int, metadata: Mapping[str, Any], written: Sequence[WrittenFile]) -> CheckpointIndex:
    """What all ranks wrote, put together."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    slices: dict[str, list[StoredSlice]] = {}
    for one in written:
        for region, sums in zip(one.regions, one.checksums, strict=True):
            kind = region.dtype, region.shape
            if kinds.setdefault(region.name, kind) != kind:
                raise CheckpointError(f"ranks do not agree on a tensor ({region.name}: {kinds[region.name]}, {kind})")
            stored = StoredSlice(one.file, one.tensors_offset + region.offset, region.box, sums)
            slices.setdefault(region.name, []).append(stored)
    tensors = {name: TensorRecord(*kinds[name], tuple(found)) for name, found in slices.items()}
    files = {one.file: FileRecord(one.nbytes, one.header) for one in written}
    found = {name: add_checksums([stored.checksum for stored in tensor.slices]) for name, tensor in tensors.items()}
    return CheckpointIndex(step, metadata, files, tensors, state_hash(found))
