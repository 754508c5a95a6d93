"""The replay check: computing a step twice before its update finds a device that computes wrongly in silence.

[Note: three passes]

    pass 1     forward and backward, as in every step
    pass 2     the same from the same weights, samples and random numbers; each rank compares its checksums
    pass 3     only where they differ: it shows which of the two was wrong, and leaves gradients that can be trusted

All ranks do the passes together, since layers communicate. What a pass changes besides gradients (statistics of
BatchNorm, expert loads, torch's random state) is restored before the next one, so a run with checks is bit-equal to one
without; on a GPU, where the passes use deterministic kernels (deterministic.py), to a run that uses these too. The
price is a forward and a backward pass every `replay.every` steps.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
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


@dataclass(frozen=True, kw_only=True)
class CorruptionFinding:
    """The first difference between two passes that one rank saw."""

    rank: int
    at: str
    """coordinates on the mesh"""
    host: str
    what: str
    layer: str
    own: bool
    """whether this rank computed the value itself, rather than receiving it"""
    wrong: int
    """the pass that was wrong; 0: neither of the two agrees with the third"""


@dataclass(frozen=True, kw_only=True)
class SilentCorruption:
    """A step whose two passes differed."""

    step: int
    findings: tuple[CorruptionFinding, ...]
    """of the ranks where it began; of all ranks that saw it where none of them computed it itself"""
    ranks: int
    """number of ranks that saw a difference"""

    def record(self) -> dict[str, Any]:
        """Return the fields of the log record."""
        return {"step": self.step, "ranks": self.ranks, "began": [asdict(finding) for finding in self.findings]}

    def __str__(self) -> str:
        first = self.findings[0]
        others = len(self.findings) - 1
        more = f" (and {others} more rank(s) at once)" if others else ""
        downstream = self.ranks - len(self.findings)
        received = f"; {downstream} other rank(s) only received its consequences" if downstream else ""
        return (
            f"silent data corruption: step {self.step}, computed again from the same state, differed on rank "
            f"{first.rank} ({first.at}) of {first.host}{more}, first in {first.what}; {VERDICTS[first.wrong]}{received}"
        )


class ReplayCheck:
    """Stands in for `Engine.forward_backward` and computes every `replay.every`-th step twice."""

    def __init__(self, engine: Engine, config: ReplayConfig, report: Callable[[SilentCorruption, str], None]):
        """`report` takes what was found and how the run continues, on every rank."""
        self._engine, self._config, self._report = engine, config, report
        self.tolerance = config.tolerance
        exact = not config.tolerance and engine.parallel.options.device.type == "cuda"
        self._kernels = deterministic_kernels if exact else nullcontext
        self._probed = False
        self._forward_backward, engine.forward_backward = engine.eager_forward_backward, self

    def __call__(self, microbatches: Iterable[Microbatch], lr: float) -> Tensor:
        engine, microbatches = self._engine, list(microbatches)
        probed, self._probed = self._probed, True
        if (engine.num_steps + 1) % self._config.every:
            if probed:
                return self._forward_backward(microbatches, lr)
            with self._kernels():  # an operator without a deterministic kernel fails in the first step, not a late one
                return self._forward_backward(microbatches, lr)
        snapshot = StepSnapshot(engine)
        first, totals = self._run_pass(microbatches, lr)
        passes = [first.values()]
        with pause_timeline_recording(engine):
            snapshot.restore()
            second, totals = self._run_pass(microbatches, lr)
            passes.append(second.values())
            index = first_difference(passes[0], passes[1], self.tolerance)
            differs = torch.tensor(float(index >= 0), device=engine.parallel.options.device)
            if not engine.parallel.axes[WORLD_AXIS].all_reduce(differs, op="max"):
                return totals
            snapshot.restore()
            third, totals = self._run_pass(microbatches, lr)
            passes.append(third.values())
        self._report_corruption(first.events, index, passes)
        return totals

    def _run_pass(self, microbatches: Sequence[Microbatch], lr: float) -> tuple[StepChecksums, Tensor]:
        checksums = StepChecksums(bits=not self.tolerance)
        self._engine.parallel.sharded_model.after_update()  # every pass gathers the parameters, not the first alone
        with self._kernels(), checksums.recording(self._engine.parallel):
            totals = self._forward_backward(microbatches, lr).clone()
        checksums.add("its own sum of losses", "loss", totals)
        return checksums, totals

    def _report_corruption(self, events: Sequence[ChecksumEvent], index: int, passes: Sequence[Tensor]) -> None:
        parallel = self._engine.parallel
        axis, mesh = parallel.axes[WORLD_AXIS], parallel.axes.mesh
        gathered: list[CorruptionFinding | None] = [None] * axis.size
        if index >= 0:
            event, rank = events[index], axis.ranks[axis.index]
            gathered[axis.index] = CorruptionFinding(
                rank=rank,
                at=mesh_position(mesh, rank),
                host=socket.gethostname(),
                what=event.what,
                layer=event.layer,
                own=event.is_local,
                wrong=self._wrong_pass(index, passes),
            )
        if axis.size > 1:
            with axis.recorder.blocking_operation("all_gather", WORLD_AXIS, axis.sequence):
                dist.all_gather_object(gathered, gathered[axis.index], group=axis.group)
        findings = [finding for finding in gathered if finding is not None]
        origins = tuple(finding for finding in findings if finding.own) or tuple(findings)
        corruption = SilentCorruption(step=self._engine.num_steps + 1, findings=origins, ranks=len(findings))
        if self._config.action == "stop":
            self._report(corruption, "")
            raise ValueError(f"{corruption}. The step updated nothing; remove that machine, and resume the run")
        trusted = all(finding.wrong for finding in origins)
        self._report(corruption, "the update uses the third pass" + ("" if trusted else ", which may be wrong too"))

    def _wrong_pass(self, index: int, passes: Sequence[Tensor]) -> int:
        """Return which of the first two passes differs from the third at `index`, if the other agrees with it."""
        # Compare the entire pass: by itself, a value that is all rounding error would agree with nothing.
        first, second, third = passes
        for wrong, right in ((1, second), (2, first)):
            differs = differences(right, third, self.tolerance)
            if index < len(differs) and not differs[index]:
                return wrong
        return 0


class StepSnapshot:
    """What forward and backward change besides gradients, to be restored before another pass."""

    def __init__(self, engine: Engine):
        device = engine.parallel.options.device
        self._buffers = [(buffer, buffer.clone()) for buffer in engine.model.buffers()]
        self._moe_layers = [(layer, layer.expert_load) for layer in engine.expert_loads.local_layers.values()]
        self._rng_state = torch.get_rng_state()
        self._device_rng_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._device = device

    @torch.no_grad()
    def restore(self) -> None:
        for buffer, value in self._buffers:
            buffer.copy_(value)
        for layer, expert_load in self._moe_layers:
            layer.expert_load = expert_load
        torch.set_rng_state(self._rng_state)
        if self._device_rng_state is not None:
            torch.cuda.set_rng_state(self._device_rng_state, self._device)


@contextmanager
def pause_timeline_recording(engine: Engine) -> Iterator[None]:
    """Suspend the recording of a pipeline's timeline, which shows the first pass only."""
    if engine.pipeline is None:
        yield
        return
    runtime = engine.pipeline.runtime
    spans, runtime.spans = runtime.spans, None
    try:
        yield
    finally:
        runtime.spans = spans
