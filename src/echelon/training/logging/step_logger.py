"""What a run shows and logs of its steps, and when it ends because too many of them updated nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from echelon.config.run_config import Config
from echelon.faults.goodput import Goodput, goodput
from echelon.faults.stragglers import Notes
from echelon.launch.world import World
from echelon.training.batch_sharding import Microbatch
from echelon.training.engine import Engine
from echelon.training.guard.first_output import first_output
from echelon.training.guard.loss_spikes import Diverged, Spike, Spikes
from echelon.training.guard.nan_debug import NotFinite
from echelon.training.guard.replay_check import Corruption
from echelon.training.logging import metrics
from echelon.training.logging.display import Display, Progress, duration, number, percent, short
from echelon.training.logging.expert_load import Balance, Load, keeps_counts
from echelon.training.logging.metrics import Peak
from echelon.training.logging.rank_stats import ENOUGH, Look, Looks
from echelon.training.logging.recompute_share import repeats_of
from echelon.training.logging.run_summary import Summary
from echelon.training.logging.stopwatch import Stopwatch
from echelon.training.run_dir import Run
from echelon.training.step_result import StepResult
from echelon.training.task import Task

COUNTED = ("start", "rollback", "step")
"""lines of a log that goodput counts"""


@dataclass(frozen=True)
class Step:
    number: int
    result: StepResult
    lr: float
    look: Callable[[], Look] | None
    """asks what was seen of all ranks, where that was looked at"""
    loads: Callable[[], list[Load]]
    """asks how many tokens the experts of each layer got"""
    batch: int
    """the number of the batch that it trained on, counted from 1"""
    again: Callable[[], Iterable[Microbatch]]
    """this rank's microbatches of it"""


class Telling:
    """All ranks are told of the same steps; the first one shows and logs them."""

    def __init__(
        self,
        config: Config,
        world: World,
        task: Task,
        engine: Engine,
        *,
        display: Display,
        looks: Looks,
        peak: Peak,
        started: float,
        run: Run | None,
    ):
        """`started` is when this rank was, by `time.perf_counter`."""
        self.config, self.world, self.task, self.engine = config, world, task, engine
        self.display, self.run = display, run
        self._looks, self._peak, self._started = looks, peak, started
        self._clock = time.time() - (time.perf_counter() - started)
        self._attempts: list[dict[str, Any]] = []
        """what goodput counts: starts and steps, of earlier attempts too"""
        self._slow = Notes()
        self.memory = 0
        """of the fullest rank, when it was last looked at"""
        self._experts: Balance | None = None
        """of the step that was told last"""
        self._dropped = 0
        """assignments to experts that found no room, in all steps"""
        self.skips = 0
        """steps in a row, up to the one that was told last, with gradients that are not finite"""
        self.spikes = Spikes(config.spike)
        self._spike: Spike | None = None
        """from which the run is about to go back"""
        self.stopwatch = Stopwatch()
        self.seconds: list[float] = []
        """of every step"""

    def begins(self, after: int, **facts: Any) -> None:
        """An attempt at the run begins after so many steps; what others did before it counts for goodput."""
        start: dict[str, Any] = {"kind": "start", "time": self._clock, "after": after, **facts}
        if self.run is not None:
            self._attempts = [record for record in self.run.records() if record["kind"] in COUNTED]
            self.run.log(**start)
        self._attempts.append(start)

    def went_back(self, after: int, batches: Sequence[int]) -> None:
        """The run goes on after so many steps, without these batches."""
        if self._spike is not None:
            what = f"batch {batches[0]} is" if len(batches) == 1 else f"batches {batches[0]} to {batches[-1]} are"
            self.display.note(f"{self._spike}; back to step {after}, {what} skipped")
        back: dict[str, Any] = {"kind": "rollback", "after": after, "skipped_batches": list(batches)}
        self._attempts.append(back)
        if self.run is not None:
            self.run.log(**back)
        self._spike, self.skips = None, 0

    def corrupted(self, found: Corruption, goes_on: str) -> None:
        """A step that was computed twice was not the same; nothing is said of a run that ends, since its error does."""
        if goes_on:
            self.display.note(f"{found}; {goes_on}")
        if self.run is not None:
            self.run.log("corruption", **found.record(), action=self.config.replay.action)

    def tell(self, steps: Sequence[Step]) -> Spike | None:
        """Waits for steps, shows and logs them; gives a spike from which the run is to go back.

        Raises where too many steps in a row had gradients that are not finite, and there is no going back.
        """
        for step in steps:
            step.result.wait()
        if steps:
            seconds = self.stopwatch.end(len(steps))
        for step in steps:
            self.seconds.append(seconds)
            not_finite = self._tell_one(step, seconds)
            if self._spike is None:  # what came after one is told, and lost with it
                self._look_for_spikes(step, not_finite)
        return self._spike

    def _look_for_spikes(self, step: Step, not_finite: NotFinite | None) -> None:
        found = self.spikes.see(step.number, step.result)
        try:
            self._count_skips(step, not_finite)
        except Diverged as error:
            if not self.spikes.goes_back:
                raise
            found = self.spikes.of(error, step.result)
        if found is None:
            return
        if self.run is not None:
            self.run.log("spike", batch=step.batch, **found.record())
        if self.spikes.goes_back:
            self._spike = found
        else:
            self.display.note(f"{found}; it was trained on batch {step.batch}")

    def _tell_one(self, step: Step, seconds: float) -> NotFinite | None:
        result, run = step.result, self.run
        waiting, data = self._looks.step(seconds)
        if step.look is not None:
            self._tell_look(step.number, step.look())
        loads = step.loads()
        if loads:
            self._experts = Balance.of(loads)
            self._dropped += self._experts.dropped
        progress = self._progress(step.number, result, self._tokens(result) / seconds)
        self.display.step(progress)
        not_finite = self.engine.not_finite(result)
        if not_finite is not None and not_finite.loss and self.engine.in_backward is None:
            not_finite = replace(not_finite, output=first_output(self.engine, step.again()))
        if not_finite is not None:
            self.display.note(f"step {step.number} skipped: {_told(result, not_finite)}")
        elif result.skipped:
            self.display.note(f"step {step.number} had no valid target: nothing was updated")
        counted = {"step": step.number, "skipped": result.skipped, "seconds": seconds, "waiting": waiting, "data": data}
        self._attempts.append({"kind": "step", **counted})
        if run is not None:
            scaled = {} if self.engine.scaling.recipe.is_one else {"loss_scale": result.loss_scale}
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
                kept = keeps_counts(step.number)
                run.log("experts", step=step.number, layers=[load.record(with_counts=kept) for load in loads])
        return not_finite

    def _count_skips(self, step: Step, not_finite: NotFinite | None) -> None:
        """All ranks are told the same, and stop together."""
        if not_finite is None:
            self.skips = 0 if step.result.count else self.skips
            return
        self.skips += 1
        fixed = self.config.loss_scaling == "fixed"
        lower = "precision.loss_scale or optimizer.lr" if fixed else "optimizer.lr"
        if self.engine.in_backward is not None:
            raise Diverged(
                f"updates in backward cannot be left out, and step {step.number} had gradients that are not finite: "
                f"{_told(step.result, not_finite)}; lower {lower}, or use optimizer.in_backward=false",
                *(step.number, step.number),
            )
        nothing = self.skips == step.number == self.config.steps
        if self.skips < self.config.precision.skips and not nothing:
            return
        layer = f" (first in {not_finite.layer})" if not_finite.layer else ""
        raise Diverged(
            f"training diverged: {self.skips} step(s) in a row up to step {step.number} had gradients that are not "
            f"finite{layer}, and updated nothing; the last one: {_told(step.result, not_finite)}. Lower {lower}, "
            "set clip, or in 16 bits keep that layer in float32 (precision.keep_fp32)",
            *(step.number - self.skips + 1, step.number),
        )

    def _tokens(self, result: StepResult) -> int:
        """What a step's rate counts: tokens of text, or valid targets of a user's module."""
        return self.config.batch * self.config.seq_len if self.task.shape else result.count

    def _tell_look(self, step: int, look: Look) -> None:
        """Who is slow is logged every time, and told when it lasts."""
        self.memory = look.memory
        if self.run is None or not look.steps or self.world.world_size == 1:
            return
        self.run.log("ranks", step=step, **look.record())
        if look.steps < ENOUGH:
            return
        for note in self._slow.notes(look.straggler, look.starved, self._looks.position):
            self.display.note(note)

    def spent(self) -> Goodput:
        now = self._clock + time.perf_counter() - self._started
        return goodput(self._attempts, now=now)

    def summary(
        self, last: StepResult, *, eval_loss: float | None, checkpoint: str | None, stopped: int | None = None
    ) -> Summary:
        """Of the run so far; `last` is the last step's."""
        spent = self.spent()
        steady = self.seconds[1:] or self.seconds  # the first step allocates, and would spoil the mean
        rate = self._tokens(last) * len(steady) / sum(steady)
        mfu, hfu = self._utilisation(rate)
        return Summary(
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
            experts={**self._experts.facts(), "dropped_in_run": self._dropped} if self._experts else None,
        )

    def _progress(self, step: int, result: StepResult, rate: float) -> Progress:
        mfu, hfu = self._utilisation(rate)
        return Progress(
            step=step,
            loss=result.loss,
            tokens_per_s=rate,
            mfu=mfu,
            hfu=hfu,
            memory=self.memory,
            experts=self._experts,
        )

    def _utilisation(self, rate: float) -> tuple[float, float]:
        """(MFU, HFU); not a number for a user's module, whose FLOPs are not known."""
        shape = self.task.shape
        if shape is None:
            return float("nan"), float("nan")
        flops = shape.flops_per_token(self.config.seq_len)
        attention = flops - shape.flops_per_token(0)
        again = metrics.recomputed_flops(repeats_of(self.engine), flops - 6 * shape.vocab * shape.width, attention)
        peak = self._peak.flops * self.world.world_size
        return metrics.mfu(flops, rate, peak), metrics.hfu(flops, rate, peak, recomputed=again)

    def results(self, summary: Summary) -> list[tuple[str, str]]:
        return [
            ("loss", number(summary.loss)),
            *([("evaluation", number(summary.eval_loss))] if summary.eval_loss is not None else []),
            ("tokens/s", short(summary.tokens_per_s)),
            ("MFU, HFU", f"{percent(summary.mfu)}, {percent(summary.hfu)}"),
            *self._results_of_experts(),
            ("time", f"{duration(time.perf_counter() - self._started)}, {self.spent().told()}"),
        ]

    def _results_of_experts(self) -> list[tuple[str, str]]:
        if self._experts is None:
            return []
        figures = ", ".join(f"{name} {value}" for name, value, _ in self._experts.figures())
        return [("experts", f"{figures}; {self._dropped:,} dropped in the run")]


def _told(result: StepResult, not_finite: NotFinite) -> str:
    """What was not finite, and what becomes of the loss scale."""
    before, after = result.loss_scale, result.next_loss_scale
    scale = f", loss scale {before:g} -> {after:g}" if before != after else f", loss scale {before:g}"
    return str(not_finite) + (scale if (before, after) != (1.0, 1.0) else "")
