"""The replay check: a step computed twice before its update, to find a device that computes wrongly without a word.

[Note: three passes]

    pass 1     forward and backward, as in every step
    pass 2     the same again, from the same weights, samples and random numbers: what each rank made is compared
    pass 3     only where they differ: it says which of the two was wrong, and leaves gradients that can be trusted

All ranks do the passes together, since layers talk to each other. What a pass changes besides gradients (statistics of
BatchNorm, counts of experts, torch's random state) is put back before the next one, so a run with checks is bit-equal
to one without; on a GPU, where the passes use kernels that repeat every bit (repeatable.py), to one that uses these.
The price is a forward and a backward pass every `replay.every` steps.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.config.sections import ReplayConfig
from echelon.parallel.comm.axis_names import WORLD_AXIS
from echelon.training.batch_sharding import Microbatch
from echelon.training.guard.deterministic import deterministic_kernels
from echelon.training.guard.step_checksums import ChecksumEvent, StepChecksums, differences, first_difference
from echelon.training.logging.rank_stats import mesh_position

if TYPE_CHECKING:
    from echelon.training.engine import Engine

VERDICTS = {1: "the first pass was wrong", 2: "the second pass was wrong", 0: "all three passes differ"}

ComputePass = Callable[[Sequence[Microbatch]], Tensor]
"""a pass: (sum of losses, number of targets) of this rank; gradients are reduced"""


@dataclass(frozen=True, kw_only=True)
class CorruptionFinding:
    """What one rank saw first of a difference between two passes."""

    rank: int
    at: str
    """its place on the mesh"""
    host: str
    what: str
    layer: str
    own: bool
    """it made this itself: the difference began there"""
    wrong: int
    """the pass that was wrong; 0: neither of the two agrees with the third"""


@dataclass(frozen=True, kw_only=True)
class SilentCorruption:
    step: int
    findings: tuple[CorruptionFinding, ...]
    """of the ranks where it began; of all that saw it where none of them made it itself"""
    ranks: int
    """that saw a difference"""

    def record(self) -> dict[str, Any]:
        """For the log."""
        return {"step": self.step, "ranks": self.ranks, "began": [asdict(one) for one in self.findings]}

    def __str__(self) -> str:
        one = self.findings[0]
        others = len(self.findings) - 1
        more = f" (and {others} more rank(s) at once)" if others else ""
        also = self.ranks - len(self.findings)
        told = f"; {also} other rank(s) only saw what came of it" if also else ""
        return (
            f"silent data corruption: step {self.step}, computed again from the same state, differed on rank "
            f"{one.rank} ({one.at}) of {one.host}{more}, first in {one.what}; {VERDICTS[one.wrong]}{told}"
        )


class ReplayCheck:
    """The checks of a run, on one rank. `Engine.replay` asks it at every step."""

    def __init__(self, engine: Engine, config: ReplayConfig, report: Callable[[SilentCorruption, str], None]):
        """`tell` is given what was found, and what the run goes on with, on every rank."""
        self._engine, self._asked, self._tell = engine, config, report
        self.tolerance = config.tolerance
        exact = not self.tolerance and engine.parallel.options.device.type == "cuda"
        self._kernels = deterministic_kernels if exact else nullcontext
        self._probed = False
        engine.replay_check = self

    def __call__(self, microbatches: Sequence[Microbatch], compute: ComputePass) -> Tensor:
        engine = self._engine
        tried, self._probed = self._probed, True
        if (engine.num_steps + 1) % self._asked.every:
            if tried:
                return compute(microbatches)
            with self._kernels():  # whether every operator has such a kernel shows in the first step, not in a late one
                return compute(microbatches)
        before = StepSnapshot(engine)
        first, totals = self._run_pass(microbatches, compute)
        values = [first.values()]
        with pause_timeline_recording(engine):
            before.restore()
            _, totals = self._run_pass(microbatches, compute, values)
            place = first_difference(values[0], values[1], self.tolerance)
            if not self._any_rank(place >= 0):
                return totals
            before.restore()
            _, totals = self._run_pass(microbatches, compute, values)
        self._report_corruption(first.events, place, values)
        return totals

    def _run_pass(
        self, microbatches: Sequence[Microbatch], compute: ComputePass, values: list[Tensor] | None = None
    ) -> tuple[StepChecksums, Tensor]:
        witness = StepChecksums(bits=not self.tolerance)
        self._engine.parallel.sharded_model.after_update()  # parameters are gathered in every pass, not in the first alone
        with self._kernels(), witness.recording(self._engine.parallel):
            totals = compute(microbatches).clone()
        witness.add("its own sum of losses", "loss", totals)
        if values is not None:
            values.append(witness.values())
        return witness, totals

    def _any_rank(self, found: bool) -> bool:
        """On some rank."""
        told = torch.tensor(float(found), device=self._engine.parallel.options.device)
        return bool(self._engine.parallel.axes[WORLD_AXIS].all_reduce(told, op="max"))

    def _report_corruption(self, events: Sequence[ChecksumEvent], place: int, values: Sequence[Tensor]) -> None:
        parallel = self._engine.parallel
        axis, mesh = parallel.axes[WORLD_AXIS], parallel.axes.mesh
        mine: CorruptionFinding | None = None
        if place >= 0:
            event, rank = events[place], axis.ranks[axis.index]
            mine = CorruptionFinding(
                rank=rank,
                at=mesh_position(mesh, rank),
                host=socket.gethostname(),
                what=event.what,
                layer=event.layer,
                own=event.is_local,
                wrong=self._wrong_pass(place, values),
            )
        every: list[CorruptionFinding | None] = [mine]
        if axis.size > 1:
            every = [None] * axis.size
            with axis.recorder.blocking_operation("all_gather", WORLD_AXIS, axis.sequence):
                dist.all_gather_object(every, mine, group=axis.group)
        saw = [one for one in every if one is not None]
        began = tuple(one for one in saw if one.own) or tuple(saw)
        found = SilentCorruption(step=self._engine.num_steps + 1, findings=began, ranks=len(saw))
        if self._asked.action == "stop":
            self._tell(found, "")
            raise ValueError(f"{found}. Nothing was updated from it; take that machine out, and resume the run")
        trusted = all(one.wrong for one in began)
        self._tell(found, "the update is made from the third pass" + ("" if trusted else ", which may be wrong too"))

    def _wrong_pass(self, place: int, values: Sequence[Tensor]) -> int:
        """Which of the first two passes the third does not agree with, where it agrees with one."""
        # All of a pass is compared: by itself, what is made of rounding would agree with nothing.
        first, second, third = values
        for wrong, right in ((1, second), (2, first)):
            differs = differences(right, third, self.tolerance)
            if place < len(differs) and not differs[place]:
                return wrong
        return 0


class StepSnapshot:
    """What a pass changes besides gradients, as it was before the first."""

    def __init__(self, engine: Engine):
        device = engine.parallel.options.device
        self._buffers = [(buffer, buffer.clone()) for buffer in engine.model.buffers()]
        self._mixtures = [(mixture, mixture.expert_load) for mixture in engine.expert_loads.local_layers.values()]
        self._random = torch.get_rng_state()
        self._on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._device = device

    @torch.no_grad()
    def restore(self) -> None:
        for buffer, value in self._buffers:
            buffer.copy_(value)
        for mixture, tally in self._mixtures:
            mixture.expert_load = tally
        torch.set_rng_state(self._random)
        if self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)


@contextmanager
def pause_timeline_recording(engine: Engine) -> Iterator[None]:
    """A timeline is of the first pass."""
    if engine.pipeline is None:
        yield
        return
    runtime = engine.pipeline.runtime
    spans, runtime.spans = runtime.spans, None
    try:
        yield
    finally:
        runtime.spans = spans
