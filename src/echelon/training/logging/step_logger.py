"""The step logger: displays and logs steps, detects spikes, and ends a run that diverged."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from echelon.faults.goodput import RunGoodput, measure_goodput
from echelon.faults.stragglers import StragglerReporter
from echelon.training.batch_sharding import Microbatch
from echelon.training.guard.loss_spikes import DivergedError, Spike, SpikeDetector
from echelon.training.guard.nan_debug import NonfiniteReport, first_nonfinite_output
from echelon.training.guard.replay_check import SilentCorruption
from echelon.training.logging import metrics
from echelon.training.logging.display import Progress, format_count, format_duration, format_number, format_percent
from echelon.training.logging.expert_load import ExpertLoad, LoadBalance, logs_counts
from echelon.training.logging.rank_stats import MIN_STEPS, RankStats
from echelon.training.logging.stopwatch import StepStopwatch
from echelon.training.run.run_dir import Run
from echelon.training.step_result import StepResult

if TYPE_CHECKING:
    from echelon.training.loop import TrainingLoop

GOODPUT_RECORDS = ("start", "rollback", "step")
"""log records that goodput is computed from"""


@dataclass(frozen=True)
class PendingStep:
    """A queued step, with functions that read its statistics."""

    number: int
    result: StepResult
    lr: float
    read_rank_stats: Callable[[], RankStats] | None
    """reads the rank statistics, if they were collected"""
    read_expert_loads: Callable[[], list[ExpertLoad]]
    """reads the expert load of each MoE layer"""
    batch: int
    """number of its batch, counted from 1"""
    reload_microbatches: Callable[[], Iterable[Microbatch]]
    """loads this rank's microbatches again"""


class StepLogger:
    """Every rank reads the same steps; rank 0 displays and logs them."""

    def __init__(self, loop: TrainingLoop, run: Run | None):
        self.config, self.world, self.task, self.engine = loop.config, loop.world, loop.task, loop.engine
        self.display, self.run = loop.display, run
        self._rank_stats, self._peak_flops, self._started = loop.rank_stats, loop.peak_flops, loop.started
        self._start_time = time.time() - (time.perf_counter() - self._started)
        self._goodput_records: list[dict[str, Any]] = []
        """starts, rollbacks and steps, of earlier attempts too"""
        self._straggler_notes = StragglerReporter()
        self.peak_memory = 0
        """of the fullest rank, as last collected"""
        self._experts: LoadBalance | None = None
        """of the step that was logged last"""
        self._dropped = 0
        """dropped token assignments in all steps"""
        self.consecutive_skips = 0
        """consecutive steps with gradients that are not finite, up to the one logged last"""
        self.spike_detector = SpikeDetector(self.config.spike)
        self._spike: Spike | None = None
        """the spike that the run must roll back"""
        self.stopwatch = StepStopwatch()
        self._pending: deque[PendingStep] = deque()
        self.step_seconds: list[float] = []
        """time of every step"""

    def log(self, kind: str, **fields: Any) -> None:
        """Append a record to the run's log, on rank 0."""
        if self.run is not None:
            self.run.log(kind, **fields)

    def log_start(self, completed_steps: int, **facts: Any) -> None:
        """Log the start of an attempt; records of earlier attempts count for goodput."""
        if self.run is not None:
            self._goodput_records = [
                record for record in self.run.records(complete=True) if record["kind"] in GOODPUT_RECORDS
            ]
        start = {"kind": "start", "time": self._start_time, "after": completed_steps, **facts}
        self._goodput_records.append(start)
        self.log(**start)

    def log_rollback(self, completed_steps: int, batches: Sequence[int]) -> None:
        """Log a rollback to `completed_steps`, after which `batches` are skipped."""
        if self._spike is not None:
            what = f"batch {batches[0]} is" if len(batches) == 1 else f"batches {batches[0]} to {batches[-1]} are"
            self.display.print_note(f"{self._spike}; rolled back to step {completed_steps}, {what} skipped")
        record: dict[str, Any] = {"kind": "rollback", "after": completed_steps, "skipped_batches": list(batches)}
        self._goodput_records.append(record)
        self.log(**record)
        self._spike, self.consecutive_skips = None, 0

    def log_corruption(self, corruption: SilentCorruption, action_text: str) -> None:
        """Log silent data corruption; without `action_text` the run ends, and its error is the note."""
        if action_text:
            self.display.print_note(f"{corruption}; {action_text}")
        self.log("corruption", **corruption.record(), action=self.config.replay.action)

    def add(self, step: PendingStep) -> None:
        """Add a step that is queued, to be logged by `log_pending`."""
        self._pending.append(step)

    def log_pending(self, keep: int = 0) -> Spike | None:
        """Wait for all added steps but the newest `keep`, and log them; return a spike that the run must roll back.

        Raises DivergedError after too many consecutive steps with gradients that are not finite, unless it rolls back.
        """
        steps = [self._pending.popleft() for _ in range(len(self._pending) - keep)]
        for step in steps:
            step.result.wait()
        if steps:
            seconds = self.stopwatch.end(len(steps))
        for step in steps:
            self.step_seconds.append(seconds)
            nonfinite = self._log_step(step, seconds)
            if self._spike is None:  # steps after a spike are logged, and rolled back with it
                self._detect_spike(step, nonfinite)
        return self._spike

    def _detect_spike(self, step: PendingStep, nonfinite: NonfiniteReport | None) -> None:
        spike = self.spike_detector.observe(step.number, step.result)
        try:
            self._count_skips(step, nonfinite)
        except DivergedError as error:
            if not self.spike_detector.rolls_back:
                raise
            spike = self.spike_detector.spike_from_divergence(error, step.result)
        if spike is None:
            return
        self.log("spike", batch=step.batch, **spike.record())
        if self.spike_detector.rolls_back:
            self._spike = spike
        else:
            self.display.print_note(f"{spike}; its batch is {step.batch}")

    def _log_step(self, step: PendingStep, seconds: float) -> NonfiniteReport | None:
        result = step.result
        waiting, data = self._rank_stats.add_step(seconds)
        if step.read_rank_stats is not None:
            self._log_rank_stats(step.number, step.read_rank_stats())
        loads = step.read_expert_loads()
        if loads:
            self._experts = LoadBalance.from_loads(loads)
            self._dropped += self._experts.dropped
        progress = self._progress(step.number, result, self._tokens(result) / seconds)
        self.display.show_step(progress)
        nonfinite = self.engine.locate_nonfinite(result)
        if nonfinite is not None and nonfinite.loss_is_nonfinite and not self.engine.update_rule.in_backward:
            nonfinite = replace(nonfinite, output=first_nonfinite_output(self.engine, step.reload_microbatches()))
        if nonfinite is not None:
            self.display.print_note(f"step {step.number} skipped: {_nonfinite_text(result, nonfinite)}")
        elif result.skipped:
            self.display.print_note(f"step {step.number} had no valid target: nothing was updated")
        spent = {"skipped": result.skipped, "seconds": seconds, "waiting": waiting, "data": data}
        self._goodput_records.append({"kind": "step", "step": step.number, **spent})
        fields = {"lr": step.lr, "norm": result.norm, "count": result.count, **spent}
        if not self.engine.normalizer.loss_scaler.recipe.is_one:
            fields["loss_scale"] = result.loss_scale
        if step.batch != step.number:
            fields["batch"] = step.batch
        self.log("step", **progress.record(), **fields)
        if nonfinite is not None:
            self.log("not finite", step=step.number, **nonfinite.record(), next_loss_scale=result.next_loss_scale)
        if loads:
            with_counts = logs_counts(step.number)
            self.log("experts", step=step.number, layers=[load.record(with_counts=with_counts) for load in loads])
        return nonfinite

    def _count_skips(self, step: PendingStep, nonfinite: NonfiniteReport | None) -> None:
        """Raise DivergedError after too many consecutive skips; all ranks do, since they read the same results."""
        if nonfinite is None:
            self.consecutive_skips = 0 if step.result.count else self.consecutive_skips
            return
        self.consecutive_skips += 1
        fixed = self.config.loss_scaling == "fixed"
        lower = "precision.loss_scale or optimizer.lr" if fixed else "optimizer.lr"
        if self.engine.update_rule.in_backward:
            raise DivergedError(
                f"updates in backward cannot be skipped, and step {step.number} had gradients that are not finite: "
                f"{_nonfinite_text(step.result, nonfinite)}; lower {lower}, or use optimizer.in_backward=false",
                *(step.number, step.number),
            )
        all_skipped = self.consecutive_skips == step.number == self.config.steps
        if self.consecutive_skips < self.config.precision.skips and not all_skipped:
            return
        layer = f" (first in {nonfinite.layer})" if nonfinite.layer else ""
        raise DivergedError(
            f"training diverged: {self.consecutive_skips} step(s) in a row up to step {step.number} had gradients that "
            f"are not finite{layer}, and updated nothing; the last: {_nonfinite_text(step.result, nonfinite)}. "
            f"Lower {lower}, set clip, or with a 16-bit dtype keep that layer in float32 (precision.keep_fp32)",
            *(step.number - self.consecutive_skips + 1, step.number),
        )

    def _tokens(self, result: StepResult) -> int:
        """Tokens of a step; valid targets for a custom model."""
        return self.config.batch * self.config.seq_len if self.task.model_config else result.count

    def _log_rank_stats(self, step: int, stats: RankStats) -> None:
        """Log the statistics every time, and note a straggler when it persists."""
        if other := ", ".join(map(str, stats.ranks_with_other_batch)):
            raise ValueError(
                f"batch(rows, step) returned another batch on rank {other} than on rank 0 (by step {step}); every rank "
                "must return the same global batch: seed its random numbers by the step, and do not shard it"
            )
        self.peak_memory = stats.peak_memory
        if self.run is None or not stats.num_steps or self.world.world_size == 1:
            return
        self.run.log("ranks", step=step, **stats.record())
        if stats.num_steps < MIN_STEPS:
            return
        for note in self._straggler_notes.report(stats.straggler, stats.starved, self._rank_stats.mesh_position):
            self.display.print_note(note)

    def goodput(self) -> RunGoodput:
        now = self._start_time + time.perf_counter() - self._started
        return measure_goodput(self._goodput_records, end_time=now)

    def summary(
        self, last: StepResult, eval_loss: float | None, *, checkpoint: str | None, stopped: int | None
    ) -> RunSummary:
        """Summarise the run so far; `last` is the result of the last step."""
        spent = self.goodput()
        steady = self.step_seconds[1:] or self.step_seconds  # without the first step, which allocates
        rate = self._tokens(last) * len(steady) / sum(steady)
        mfu, hfu = self._utilisation(rate)
        return RunSummary(
            run="" if self.run is None else str(self.run.path),
            steps=self.config.steps,
            loss=last.loss,
            tokens_per_s=rate,
            mfu=mfu,
            hfu=hfu,
            goodput=spent.share,
            eval_loss=eval_loss,
            time=asdict(spent),
            checkpoint=checkpoint,
            stopped=stopped,
            experts={**self._experts.as_dict(), "dropped_in_run": self._dropped} if self._experts else None,
        )

    def _progress(self, step: int, result: StepResult, rate: float) -> Progress:
        mfu, hfu = self._utilisation(rate)
        memory, experts = self.peak_memory, self._experts
        return Progress(
            step=step, loss=result.loss, tokens_per_s=rate, mfu=mfu, hfu=hfu, memory=memory, experts=experts
        )

    def _utilisation(self, rate: float) -> tuple[float, float]:
        """Return (MFU, HFU); NaN for a custom model, whose FLOPs are unknown."""
        model = self.task.model_config
        if model is None:
            return float("nan"), float("nan")
        flops = model.flops_per_token(self.config.seq_len)
        attention = flops - model.flops_per_token(0)
        blocks = flops - 6 * model.vocab * model.width
        recomputed = metrics.recomputed_flops(metrics.recompute_shares(self.engine), blocks, attention)
        if self.engine.adapted_linears:  # frozen weights have no gradients: 4 FLOPs a parameter, and 6 of the trained
            flops = attention + 4 * (flops - attention) // 6 + 6 * self.engine.num_trained
        peak = self._peak_flops.flops * self.world.world_size
        return metrics.mfu(flops, rate, peak), metrics.hfu(flops, rate, peak, recomputed=recomputed)

    def summary_rows(self, summary: RunSummary) -> list[tuple[str, str]]:
        rows = [("loss", format_number(summary.loss))]
        if summary.eval_loss is not None:
            rows.append(("evaluation", format_number(summary.eval_loss)))
        rows.append(("tokens/s", format_count(summary.tokens_per_s)))
        rows.append(("MFU, HFU", f"{format_percent(summary.mfu)}, {format_percent(summary.hfu)}"))
        if self._experts is not None:
            figures = ", ".join(f"{name} {value}" for name, value, _ in self._experts.figures())
            rows.append(("experts", f"{figures}; {self._dropped:,} dropped in the run"))
        seconds = format_duration(time.perf_counter() - self._started)
        return [*rows, ("time", f"{seconds}, {self.goodput().summary()}")]


def _nonfinite_text(result: StepResult, nonfinite: NonfiniteReport) -> str:
    """Describe what was not finite, and the change of the loss scale."""
    before, after = result.loss_scale, result.next_loss_scale
    scale = f", loss scale {before:g} -> {after:g}" if before != after else f", loss scale {before:g}"
    return str(nonfinite) + (scale if (before, after) != (1.0, 1.0) else "")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Results of a run; the keys of `train --json`."""

    run: str
    """its directory"""
    steps: int
    loss: float
    tokens_per_s: float
    mfu: float
    hfu: float
    goodput: float
    """fraction of the time since start-up in training steps that count"""
    eval_loss: float | None
    time: dict[str, float]
    """seconds by cause (faults/goodput.py)"""
    checkpoint: str | None = None
    """the last checkpoint"""
    experts: dict[str, Any] | None = None
    """load balance of the last step, and `dropped_in_run`; None for a model without experts"""

    stopped: int | None = None
    """the step after which SIGTERM stopped it; None for a complete run"""

    def log_fields(self) -> dict[str, Any]:
        """Return the fields of the log record and of `--json`; `experts` and `stopped` only if they apply."""
        optional = ("experts", "stopped")
        return {name: value for name, value in asdict(self).items() if name not in optional or value is not None}
