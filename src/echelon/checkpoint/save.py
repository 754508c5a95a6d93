"""Saving a checkpoint in the background of training: copy, write, checksum, and one atomic rename.

[Note: a save]

    1  all ranks    copy their slices to host memory (staging.py)                    before the next update
    2  rank 0       creates the directory `.writing-step-…`
    3  all ranks    write and flush their file, and compute its checksums
    4  rank 0       gathers the lists of regions, writes the index, and renames the directory: the checkpoint exists
    5  rank 0       removes expired checkpoints and broadcasts the outcome

Background threads do all of it.

A save waits for the previous one. An error is raised when training next calls `check`, `save` or `wait`; the directory
is removed, and earlier checkpoints are unchanged.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from echelon.checkpoint import checkpoint_index
from echelon.checkpoint.checkpoint_index import CheckpointError, CheckpointIndex, FileRegion, StoredSlice
from echelon.checkpoint.checksums import Checksum, add_checksums, state_hash
from echelon.checkpoint.coordination import CheckpointGroup, errors_on_all_ranks
from echelon.checkpoint.staging import HostStaging
from echelon.checkpoint.storage import Storage, step_dir_name
from echelon.checkpoint.training_state import TrainingState

FAILURE_GRACE_S = 3.0
"""seconds that a failing run waits for a save to finish"""


@dataclass(frozen=True)
class WrittenFile:
    """The file that a rank has written."""

    file: str
    nbytes: int
    header: str
    tensors_offset: int
    """offset of the first tensor in the file"""
    regions: Sequence[FileRegion]
    checksums: Sequence[Checksum]


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Which checkpoints to keep."""

    last: int = 2
    """the number of newest ones; 0 keeps all"""
    every: int = 0
    """also those of steps that this divides; 0: none"""

    def expired(self, steps: Sequence[int]) -> list[int]:
        """The steps to remove, of all checkpoints' steps in order."""
        old = steps[: -self.last] if self.last else []
        return [step for step in old if not (self.every and step % self.every == 0)]


class CheckpointSaver:
    """Saves checkpoints of a run. Every rank creates one and makes the same calls."""

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
        """address of the newest complete checkpoint"""
        self.hash = ""
        """hash of its state"""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's file."""
        return self._staging.nbytes

    def save(self, step: int, metadata: Mapping[str, Any], *, in_background: bool = False) -> None:
        """Start to save the current state.

        The state may change when this returns; with `in_background`, when `wait_before_update` returns.
        """
        self.wait()
        self._staging.snapshot(self._state, in_background=in_background)
        threading.Thread(target=self._staging.run_background_copies, name="echelon-copy", daemon=True).start()
        args = (step, dict(metadata))
        self._thread = threading.Thread(target=self._save_in_thread, args=args, name="echelon-save", daemon=True)
        self._thread.start()

    def wait_before_update(self) -> None:
        """Wait until the state may change."""
        self._staging.wait_before_update()

    def check(self) -> None:
        """Raise the error of a save that has finished."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the current save and raise its error."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> bool:
        """Wait a moment for the current save, after the last one or after a failure; true if no save is left.

        A hanging rank would never write its file, and its failure must be reported now.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(FAILURE_GRACE_S)
        return thread is None or not thread.is_alive()

    def _save_in_thread(self, step: int, metadata: dict[str, Any]) -> None:
        try:
            self.hash = self._write(step, metadata)
            self.last_address = f"{self._storage.address}/{step_dir_name(step)}"
        except BaseException as error:  # raised when training next calls `check`, `save` or `wait`
            self._error = error

    def _write(self, step: int, metadata: dict[str, Any]) -> str:
        """Write the checkpoint; return the hash of its state."""
        group = self._group
        with errors_on_all_ranks(group):
            if group.is_rank_zero:
                self._storage.begin(step)
        try:
            with errors_on_all_ranks(group):
                written = self._write_part(step)
            all_written, hash_on_rank_zero = group.gather(written), ""
            with errors_on_all_ranks(group):
                if group.is_rank_zero:
                    index = build_index(step, metadata, all_written)
                    self._commit(index)
                    hash_on_rank_zero = index.hash
            return group.broadcast(hash_on_rank_zero)
        except BaseException:
            if group.is_rank_zero:
                self._storage.abandon(step)
            raise

    def _write_part(self, step: int) -> WrittenFile:
        staging = self._staging
        checksums: list[Checksum] = []
        errors: list[BaseException] = []

        def add_checksums_of_regions() -> None:
            try:
                checksums.extend(staging.checksums())
            except BaseException as error:
                errors.append(error)

        checksumming = threading.Thread(target=add_checksums_of_regions, name="echelon-checksums", daemon=True)
        checksumming.start()
        name = f"part-{self._group.rank:05d}.safetensors"
        try:
            self._storage.write(step, name, staging.file_view(), staging.wait_for_bytes)
        finally:
            checksumming.join()
        if errors:
            raise errors[0]
        header = hashlib.sha256(staging.header).hexdigest()
        return WrittenFile(name, staging.nbytes, header, len(staging.header), staging.regions, checksums)

    def _commit(self, index: CheckpointIndex) -> None:
        index.check_complete()
        text, step, storage = index.to_json(), index.step, self._storage
        storage.write(step, checkpoint_index.DIGEST_FILE, checkpoint_index.digest_line(text).encode())
        storage.write(step, checkpoint_index.INDEX_FILE, text.encode())
        storage.commit(step)
        for old in self._retention.expired([saved for saved in storage.steps() if saved <= step]):
            storage.remove(old)


def build_index(step: int, metadata: Mapping[str, Any], written: Sequence[WrittenFile]) -> CheckpointIndex:
    """Build the index of the files that all ranks wrote."""
    specs: dict[str, tuple[str, tuple[int, ...]]] = {}
    slices: dict[str, list[StoredSlice]] = {}
    for part in written:
        for region, checksum in zip(part.regions, part.checksums, strict=True):
            spec = region.dtype, region.shape
            if specs.setdefault(region.name, spec) != spec:
                raise CheckpointError(f"ranks disagree about a tensor ({region.name}: {specs[region.name]}, {spec})")
            stored = StoredSlice(part.file, part.tensors_offset + region.offset, region.box, checksum)
            slices.setdefault(region.name, []).append(stored)
    tensors = {name: checkpoint_index.TensorRecord(*specs[name], tuple(stored)) for name, stored in slices.items()}
    files = {part.file: checkpoint_index.FileRecord(part.nbytes, part.header) for part in written}
    checksums = {name: add_checksums([stored.checksum for stored in tensor.slices]) for name, tensor in tensors.items()}
    return CheckpointIndex(step, metadata, files, tensors, state_hash(checksums))
