"""Fault injection into phases of a step, collectives, batches, module outputs and files.

Code that writes files of a run (checkpoints) does so inside `on_file_write`:

    with on_file_write(path):
        write(path)

Without an active injector this does nothing; nor do `corrupt_batch` and `should_flip_output`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.faults.flight_recorder import FlightRecorder
from echelon.faults.injection_spec import Injection

if TYPE_CHECKING:
    from torch import Tensor

SLOWED_PHASES = ("forward", "backward", "update")
"""phases that `slow-rank` slows down"""


class InjectedError(RuntimeError):
    """The exception of an injected `raise`."""


class Injector:
    """The injected faults of one rank."""

    def __init__(
        self,
        injections: Sequence[Injection],
        rank: int,
        recorder: FlightRecorder,
        on_strike: Callable[[str, int], None] = lambda fault, step: None,
    ):
        """`on_strike` is called with each fault and its step, just before it strikes."""
        self._on_strike = on_strike
        self._pending = [fault for fault in injections if fault.options.get("rank") in (None, rank)]
        self.rank, self._recorder = rank, recorder
        self._mark = (time.time(), 0.0, 0.0, "")
        self._corrupted: tuple[int, set[int]] = (0, set())
        """the step whose batch is corrupted, and the first sample of each microbatch that was"""

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Inject the faults inside the block."""
        global _active
        if not self._pending:
            yield
            return
        recorder = self._recorder
        for _ in self._take_due(("gone",), 0):
            os.kill(os.getpid(), signal.SIGKILL)
        recorder.on_phase, recorder.should_skip, _active = self._on_phase, self._should_skip, self
        try:
            yield
        finally:
            recorder.on_phase = recorder.should_skip = _active = None

    def _take_due(self, kinds: Sequence[str], step: int, phase: str | None = None) -> list[Injection]:
        """Remove and return the faults that are due; each strikes once."""
        due = [fault for fault in self._pending if fault.kind in kinds and fault.step == step]
        due = [fault for fault in due if phase is None or fault.phase == phase]
        for fault in due:
            self._strike(fault, step)
        return due

    def _strike(self, fault: Injection, step: int, where: str = "") -> None:
        self._pending.remove(fault)
        self._on_strike(f"{fault}{where}", step)

    def _on_phase(self, step: int, phase: str) -> None:
        self._slow_down(step, phase)
        if phase == "forward" and self._take_due(("gone",), step):
            os.kill(os.getpid(), signal.SIGKILL)
        for fault in self._take_due(("kill", "raise", "sleep"), step, phase):
            if fault.kind == "kill":
                os.kill(os.getpid(), fault.signal_number)
            elif fault.kind == "sleep":
                time.sleep(fault.seconds)
            else:
                raise InjectedError(f"injected into rank {self.rank} in {phase} of step {step} ({fault})")

    def _slow_down(self, step: int, phase: str) -> None:
        """Sleep so that the previous phase, without its waits, takes `factor` times as long."""
        start, wait_s, data_wait_s, previous = self._mark
        recorder = self._recorder
        busy = time.time() - start - (recorder.wait_s - wait_s) - (recorder.data_wait_s - data_wait_s)
        for fault in self._pending:
            if fault.kind == "slow-rank" and step >= fault.step and previous in SLOWED_PHASES and busy > 0:
                time.sleep((fault.factor - 1) * busy)
                # The recorder already counts the time of the next phase, data loading; this sleep is not part of it.
                recorder.data_wait_s -= (fault.factor - 1) * busy if phase == "data" else 0.0
        self._mark = (time.time(), recorder.wait_s, recorder.data_wait_s, phase)

    def _should_skip(self, step: int, op: str, axis: str) -> bool:
        for fault in self._pending:
            is_due = fault.kind == "skip-collective" and fault.step == step
            if is_due and fault.axis in ("", axis) and fault.op in ("", op):
                self._strike(fault, step)
                return True
        return False

    def on_file_written(self, path: Path) -> None:
        step = self._recorder.step
        of_files = [fault for fault in self._pending if fault.kind in ("corrupt-file", "full-disk")]
        for fault in of_files:
            if fault.step > max(step, 1) or not fnmatch(path.name, fault.name):
                continue
            self._strike(fault, step)
            size = path.stat().st_size
            if fault.kind == "full-disk":
                os.truncate(path, size // 2)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            _flip_byte(path, size // 2 if fault.byte is None else min(fault.byte, size - 1))

    def should_corrupt_batch(self, sample: int) -> bool:
        """Whether to corrupt a microbatch: all of the step's, in the first attempt at the step."""
        step = self._recorder.step
        if self._take_due(("spike",), step):
            self._corrupted = (step, set())
        corrupted_step, done = self._corrupted
        if corrupted_step != step or sample in done:  # the second attempt repeats the samples of the first
            self._corrupted = (0, set())
            return False
        done.add(sample)
        return True

    def should_flip(self, name: str) -> bool:
        """Whether to flip a bit of this module's output or this parameter's gradient, once."""
        step = self._recorder.step
        due = [flip for flip in self.pending_flips if flip.step == step and fnmatch(name, flip.layer)]
        if due:
            self._strike(due[0], step, f" ({name})")
        return bool(due)

    @property
    def pending_flips(self) -> list[Injection]:
        return [fault for fault in self._pending if fault.kind == "flip"]


_active: Injector | None = None


def pending_flip_patterns() -> list[str]:
    """Module and parameter patterns of the pending bit flips on this rank."""
    return [flip.layer for flip in _active.pending_flips] if _active is not None else []


def should_flip_output(name: str) -> bool:
    """Whether to flip a bit of a module's output, or of a parameter's gradient."""
    return _active is not None and _active.should_flip(name)


def corrupt_batch(inputs: Mapping[str, Tensor], samples: Tensor) -> Mapping[str, Tensor]:
    """Replace a microbatch by noise if a `spike` is due: random integers, floats a hundred times as large.

    The noise is a function of the samples' numbers, so ranks that share a microbatch share the noise.
    """
    if _active is None or not _active.should_corrupt_batch(int(samples[0])):
        return inputs
    import torch

    noise = torch.Generator().manual_seed(int(samples[0]))
    corrupted = {}
    for name, value in inputs.items():
        if value.is_floating_point():
            corrupted[name] = value * 100
        elif name == "documents":
            corrupted[name] = value
        else:
            drawn = torch.randint(0, max(int(value.max()), 0) + 1, value.shape, generator=noise).to(value)
            corrupted[name] = torch.where(value < 0, value, drawn)  # below 0: no target
    return corrupted


@contextmanager
def on_file_write(path: str | Path) -> Iterator[None]:
    """Corrupt the file that the block writes if a fault is due. A full disk leaves half of it and raises ENOSPC."""
    yield
    if _active is not None:
        _active.on_file_written(Path(path))


def _flip_byte(path: Path, place: int) -> None:
    """Invert all bits of one byte."""
    with contextlib.suppress(IndexError), open(path, "r+b") as file:
        file.seek(place)
        old = file.read(1)
        file.seek(place)
        file.write(bytes([old[0] ^ 0xFF]))
