"""What a run shows and logs of its steps, and when it ends because too many of them updated nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from echelon.config.run_config import Config
from echelon.faults.goodput import RunGoodput, measure_goodput
from echelon.faults.stragglers import StragglerReporter
from echelon.launch.world import World
from echelon.training.batch_sharding import Microbatch
from echelon.training.engine import Engine
from echelon.training.guard.loss_spikes import DivergedError, Spike, SpikeDetector
from echelon.training.guard.nan_debug import NonfiniteReport, first_nonfinite_output
from echelon.training.guard.replay_check import SilentCorruption
from echelon.training.logging import metrics
from echelon.training.logging.display import (
    Display,
    Progress,
    format_count,
    format_duration,
    format_number,
    format_percent,
)
from echelon.training.logging.expert_load import ExpertLoad, LoadBalance, logs_counts
from echelon.training.logging.metrics import PeakFlops, recompute_shares
from echelon.training.logging.rank_stats import MIN_STEPS, RankStats, RankStatsCollector
from echelon.training.logging.stopwatch import StepStopwatch
from echelon.training.run.run_dir import Run
from echelon.training.step_result import StepResult
from echelon.training.task import TrainingTask

GOODPUT_RECORDS = ("start", "rollback", "step")
"""lines of a log that goodput counts"""


@dataclass(frozen=True)
class PendingStep:
    number: int
    result: StepResult
    lr: float
    read_rank_stats: Callable[[], RankStats] | None
    """asks what was seen of all ranks, where that was looked at"""
    read_expert_loads: Callable[[], list[ExpertLoad]]
    """asks how many tokens the experts of each layer got"""
    batch: int
    """the number of the batch that it trained on, counted from 1"""
    reload_microbatches: Callable[[], Iterable[Microbatch]]
    """this rank's microbatches of it"""


class StepLogger:
    """All ranks are told of the same steps; the first one shows and logs them."""

    def __init__(
        self,
        config: Config,
        world: World,
        task: TrainingTask,
        engine: Engine,
        *,
        display: Display,
        rank_stats: RankStatsCollector,
        peak_flops: PeakFlops,
        started: float,
        run: Run | None,
    ):
        """`started` is when this rank was, by `time.perf_counter`."""
        self.config, self.world, self.task, self.engine = config, world, task, engine
        self.display, self.run = display, run
        self._rank_stats, self._peak_flops, self._started = rank_stats, peak_flops, started
        self._start_time = time.time() - (time.perf_counter() - started)
        self._goodput_records: list[dict[str, Any]] = []
        """what goodput counts: starts and steps, of earlier attempts too"""
        self._straggler_notes = StragglerReporter()
        self.peak_memory = 0
        """of the fullest rank, when it was last looked at"""
        self._experts: LoadBalance | None = None
        """of the step that was told last"""
        self._dropped = 0
        """assignments to experts that found no room, in all steps"""
        self.consecutive_skips = 0
        """steps in a row, up to the one that was told last, with gradients that are not finite"""
        self.spike_detector = SpikeDetector(config.spike)
        self._spike: Spike | None = None
        """from which the run is about to go back"""
        self.stopwatch = StepStopwatch()
        self.step_seconds: list[float] = []
        """of every step"""

    def log_start(self, completed_steps: int, **facts: Any) -> None:
        """An attempt at the run begins after so many steps; what others did before it counts for goodput."""
        start: dict[str, Any] = {"kind": "start", "time": self._start_time, "after": completed_steps, **facts}
        if self.run is not None:
            self._goodput_records = [record for record in self.run.records() if record["kind"] in GOODPUT_RECORDS]
            self.run.log(**start)
        self._goodput_records.append(start)

    def log_rollback(self, completed_steps: int, batches: Sequence[int]) -> None:
        """The run goes on after so many steps, without these batches."""
        if self._spike is not None:
            what = f"batch {batches[0]} is" if len(batches) == 1 else f"batches {batches[0]} to {batches[-1]} are"
            self.display.print_note(f"{self._spike}; back to step {completed_steps}, {what} skipped")
        back: dict[str, Any] = {"kind": "rollback", "after": completed_steps, "skipped_batches": list(batches)}
        self._goodput_records.append(back)
        if self.run is not None:
            self.run.log(**back)
        self._spike, self.consecutive_skips = None, 0

    def log_corruption(self, found: SilentCorruption, action_text: str) -> None:
        """A step that was computed twice was not the same; nothing is said of a run that ends, since its error does."""
        if action_text:
            self.display.print_note(f"{found}; {action_text}")
        if self.run is not None:
            self.run.log("corruption", **found.record(), action=self.config.replay.action)

    def log_steps(self, steps: Sequence[PendingStep]) -> Spike | None:
        """Waits for steps, shows and logs them; gives a spike from which the run is to go back.

        Raises where too many steps in a row had gradients that are not finite, and there is no going back.
        """
        for step in steps:
            step.result.wait()
        if steps:
            seconds = self.stopwatch.end(len(steps))
        for step in steps:
            self.step_seconds.append(seconds)
            not_finite = self._log_step(step, seconds)
            if self._spike is None:  # what came after one is told, and lost with it
                self._detect_spike(step, not_finite)
        return self._spike

    def _detect_spike(self, step: PendingStep, not_finite: NonfiniteReport | None) -> None:
        found = self.spike_detector.observe(step.number, step.result)
        try:
            self._count_skips(step, not_finite)
        except DivergedError as error:
            if not self.spike_detector.rolls_back:
                raise
            found = self.spike_detector.spike_from_divergence(error, step.result)
        if found is None:
            return
        if self.run is not None:
            self.run.log("spike", batch=step.batch, **found.record())
        if self.spike_detector.rolls_back:
            self._spike = found
        else:
            self.display.print_note(f"{found}; it was trained on batch {step.batch}")

    def _log_step(self, step: PendingStep, seconds: float) -> NonfiniteReport | None:
        result, run = step.result, self.run
        waiting, data = self._rank_stats.add_step(seconds)
        if step.read_rank_stats is not None:
            self._log_rank_stats(step.number, step.read_rank_stats())
        loads = step.read_expert_loads()
        if loads:
            self._experts = LoadBalance.from_loads(loads)
            self._dropped += self._experts.dropped
        progress = self._progress(step.number, result, self._tokens(result) / seconds)
        self.display.show_step(progress)
        not_finite = self.engine.locate_nonfinite(result)
        if not_finite is not None and not_finite.loss_is_nonfinite and not self.engine.update_rule.in_backward:
            not_finite = replace(not_finite, output=first_nonfinite_output(self.engine, step.reload_microbatches()))
        if not_finite is not None:
            self.display.print_note(f"step {step.number} skipped: {_nonfinite_text(result, not_finite)}")
        elif result.skipped:
            self.display.print_note(f"step {step.number} had no valid target: nothing was updated")
        counted = {"step": step.number, "skipped": result.skipped, "seconds": seconds, "waiting": waiting, "data": data}
        self._goodput_records.append({"kind": "step", **counted})
        if run is not None:
            scaled = {} if self.engine.normalizer.loss_scaler.recipe.is_one else {"loss_scale": result.loss_scale}
            run.log(
                "step",
                **progress.record(),
                lr=step.lr,
                norm=result.norm,
                count=result.count,
                **{name: value for name, value in counted.items() if name != "step"},
                **scaled,
                **({"batch": step.batch} if step.batch != step.number else {}),
            )
            if not_finite is not None:
                run.log("not finite", step=step.number, **not_finite.record(), next_loss_scale=result.next_loss_scale)
            if loads:
                kept = logs_counts(step.number)
                run.log("experts", step=step.number, layers=[load.record(with_counts=kept) for load in loads])
        return not_finite

    def _count_skips(self, step: PendingStep, not_finite: NonfiniteReport | None) -> None:
        """All ranks are told the same, and stop together."""
        if not_finite is None:
            self.consecutive_skips = 0 if step.result.count else self.consecutive_skips
            return
        self.consecutive_skips += 1
        fixed = self.config.loss_scaling == "fixed"
        lower = "precision.loss_scale or optimizer.lr" if fixed else "optimizer.lr"
        if self.engine.update_rule.in_backward:
            raise DivergedError(
                f"updates in backward cannot be left out, and step {step.number} had gradients that are not finite: "
                f"{_nonfinite_text(step.result, not_finite)}; lower {lower}, or use optimizer.in_backward=false",
                *(step.number, step.number),
            )
        nothing = self.consecutive_skips == step.number == self.config.steps
        if self.consecutive_skips < self.config.precision.skips and not nothing:
            return
        layer = f" (first in {not_finite.layer})" if not_finite.layer else ""
        raise DivergedError(
            f"training diverged: {self.consecutive_skips} step(s) in a row up to step {step.number} had gradients that are not "
            f"finite{layer}, and updated nothing; the last one: {_nonfinite_text(step.result, not_finite)}. Lower {lower}, "
            "set clip, or in 16 bits keep that layer in float32 (precision.keep_fp32)",
            *(step.number - self.consecutive_skips + 1, step.number),
        )

    def _tokens(self, result: StepResult) -> int:
        """What a step's rate counts: tokens of text, or valid targets of a user's module."""
        return self.config.batch * self.config.seq_len if self.task.model_config else result.count

    def _log_rank_stats(self, step: int, look: RankStats) -> None:
        """Who is slow is logged every time, and told when it lasts."""
        self.peak_memory = look.peak_memory
        if self.run is None or not look.num_steps or self.world.world_size == 1:
            return
        self.run.log("ranks", step=step, **look.record())
        if look.num_steps < MIN_STEPS:
            return
        for note in self._straggler_notes.report(look.straggler, look.starved, self._rank_stats.mesh_position):
            self.display.print_note(note)

    def goodput(self) -> RunGoodput:
        now = self._start_time + time.perf_counter() - self._started
        return measure_goodput(self._goodput_records, end_time=now)

    def summary(
        self, last: StepResult, *, eval_loss: float | None, checkpoint: str | None, stopped: int | None = None
    ) -> RunSummary:
        """Of the run so far; `last` is the last step's."""
        spent = self.goodput()
        steady = self.step_seconds[1:] or self.step_seconds  # the first step allocates, and would spoil the mean
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
            time=spent.record(),
            checkpoint=checkpoint,
            stopped=stopped,
            experts={**self._experts.as_dict(), "dropped_in_run": self._dropped} if self._experts else None,
        )

    def _progress(self, step: int, result: StepResult, rate: float) -> Progress:
        mfu, hfu = self._utilisation(rate)
        return Progress(
            step=step,
            loss=result.loss,
            tokens_per_s=rate,
            mfu=mfu,
            hfu=hfu,
            memory=self.peak_memory,
            experts=self._experts,
        )

    def _utilisation(self, rate: float) -> tuple[float, float]:
        """(MFU, HFU); not a number for a user's module, whose FLOPs are not known."""
        shape = self.task.model_config
        if shape is None:
            return float("nan"), float("nan")
        flops = shape.flops_per_token(self.config.seq_len)
        attention = flops - shape.flops_per_token(0)
        again = metrics.recomputed_flops(
            recompute_shares(self.engine), flops - 6 * shape.vocab * shape.width, attention
        )
        peak = self._peak_flops.flops * self.world.world_size
        return metrics.mfu(flops, rate, peak), metrics.hfu(flops, rate, peak, recomputed=again)

    def summary_rows(self, summary: RunSummary) -> list[tuple[str, str]]:
        return [
            ("loss", format_number(summary.loss)),
            *([("evaluation", format_number(summary.eval_loss))] if summary.eval_loss is not None else []),
            ("tokens/s", format_count(summary.tokens_per_s)),
            ("MFU, HFU", f"{format_percent(summary.mfu)}, {format_percent(summary.hfu)}"),
            *self._expert_rows(),
            ("time", f"{format_duration(time.perf_counter() - self._started)}, {self.goodput().summary()}"),
        ]

    def _expert_rows(self) -> list[tuple[str, str]]:
        if self._experts is None:
            return []
        figures = ", ".join(f"{name} {value}" for name, value, _ in self._experts.figures())
        return [("experts", f"{figures}; {self._dropped:,} dropped in the run")]


def _nonfinite_text(result: StepResult, not_finite: NonfiniteReport) -> str:
    """What was not finite, and what becomes of the loss scale."""
    before, after = result.loss_scale, result.next_loss_scale
    scale = f", loss scale {before:g} -> {after:g}" if before != after else f", loss scale {before:g}"
    return str(not_finite) + (scale if (before, after) != (1.0, 1.0) else "")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a run came to; the keys of `train --json`."""

    run: str
    """its directory"""
    steps: int
    loss: float
    tokens_per_s: float
    mfu: float
    hfu: float
    goodput: float
    """share of the time since start-up that went into training steps that were kept"""
    eval_loss: float | None
    time: dict[str, float]
    """what goodput is made of (faults/goodput.py)"""
    checkpoint: str | None = None
    """the last checkpoint"""
    experts: dict[str, Any] | None = None
    """how evenly experts were used in the last step, and `dropped_in_run`; none where the model has no experts"""

    stopped: int | None = None
    """the step after which it stopped because it was asked to (SIGTERM); none where it came to its end"""

    def log_fields(self) -> dict[str, Any]:
        """For the log and `--json`: of experts only where there are some, of a stop only where there was one."""
        rare = ("experts", "stopped")
        return {name: value for name, value in asdict(self).items() if name not in rare or value is not None}
