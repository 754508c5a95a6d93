"""The training loop, as every rank runs it: steps, evaluation, a sample of text, one log."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from echelon.faults.goodput import Goodput, goodput
from echelon.faults.inject import Injector
from echelon.faults.injection import Injection
from echelon.faults.ring import here
from echelon.faults.stragglers import Notes
from echelon.faults.watch import Watch, watched
from echelon.launch.world import World, join
from echelon.layout import Mesh, check
from echelon.parallel.apply import WORLD, Options
from echelon.pipeline import timeline
from echelon.pipeline.measure import everywhere, measured_split, profile_of
from echelon.pipeline.profile import Profile
from echelon.plan import correct
from echelon.train import metrics
from echelon.train.again import repeats_of
from echelon.train.checkpoints import Checkpoints
from echelon.train.config import Config
from echelon.train.derived import derived
from echelon.train.display import Display, Progress, duration, number, percent, short
from echelon.train.engine import Engine
from echelon.train.load import Balance, Load, keeps_counts
from echelon.train.looks import ENOUGH, EVERY, Look, Looks, position
from echelon.train.not_finite import NotFinite
from echelon.train.options import loss_scale_of, options_of
from echelon.train.pipeline_faults import MEASURE
from echelon.train.predicted import predicted, working_bytes
from echelon.train.result import StepResult
from echelon.train.resume import where
from echelon.train.run import Run
from echelon.train.schedule import learning_rate
from echelon.train.stopwatch import Stopwatch
from echelon.train.summary import Summary
from echelon.train.task import task_of


@dataclass(frozen=True)
class _Step:
    number: int
    result: StepResult
    lr: float
    look: Callable[[], Look] | None
    """asks what was seen of all ranks, where that was looked at"""
    loads: Callable[[], list[Load]]
    """asks how many tokens the experts of each layer got"""


def train_here(config: Config, quiet: bool = False, inject: Sequence[Injection] = (), resume: str = "") -> Summary:
    """Trains on the ranks this process was started among: all of them call this, rank 0's summary names the run."""
    with (
        join(config.device, config.timeout) as world,
        watched(world, config.timeout) as watch,
        Injector(inject, world.rank, on_strike=watch.injected).armed(),
    ):
        return Loop(config, world, quiet=quiet, watch=watch, resume=resume).run()


class Loop:
    """One rank's part of a run."""

    def __init__(self, config: Config, world: World, *, quiet: bool, watch: Watch, resume: str = ""):
        self.config, self.world, self._watch, self.resume = config, world, watch, resume
        self.started, self._clock = time.perf_counter(), time.time()
        lane = here.lane(range(world.world_size))
        self.task = task_of(config, world.first_rank_first(lambda: here.doing("barrier", "world", lane)))
        self.layout = check(
            config.layout, world=world.world_size, batch=config.batch, seq_len=config.seq_len, model=self.task.shape
        )
        here.position = position(Mesh(self.layout), world.rank)
        options = options_of(config, world.device)
        options = replace(options, working=working_bytes(config, self.layout, self.task.shape, world))
        self.profile = self._profile(options) if config.pipeline.profile else None
        if self.profile is not None:
            split = measured_split(self.profile, self.layout, world.device)
            options = replace(options, stage_layers=split.layers, link_costs=self.profile.costs)
        self.engine = Engine(
            self.task.build(),
            self.layout,
            config.optimizer,
            clip=config.clip,
            options=options,
            loss_scale=loss_scale_of(config),
        )
        self.engine.model.train()
        axes = self.engine.parallel.axes
        self._looks = Looks(axes[WORLD], world.device, axes.mesh)
        self._told: list[dict[str, Any]] = []
        """what goodput counts: starts and steps, of earlier attempts too"""
        self._slow = Notes()
        self.peak = metrics.peak_flops(world.device)
        self.display = Display(config.steps, quiet=quiet or world.rank > 0)
        self._memory = 0
        self._experts: Balance | None = None
        """of the step that was told last"""
        self._dropped = 0
        """assignments to experts that found no room, in all steps"""
        self._skips = 0
        """steps in a row, up to the one that was told last, with gradients that are not finite"""
        self._stopwatch = Stopwatch()
        self._seconds: list[float] = []
        """of every step"""

    def _profile(self, options: Options) -> Profile:
        """What each layer takes: read from a file, or measured here."""
        given = self.config.pipeline.profile
        if given != MEASURE:
            return Profile.from_json(Path(given).read_text(encoding="utf-8"))
        return everywhere(
            lambda: profile_of(
                self.task.build(),
                self.task.example(self.layout.microbatch),
                device=options.device,
                dtype=options.compute,
            )
        )

    def run(self) -> Summary:
        threads = torch.get_num_threads()
        if self.layout.recompute.startswith("budget"):
            self.engine.rehearse(next(iter(self.task.microbatches(self.engine, 0))))
        rows = [*self.task.describe(), *derived(self.config, self.engine, self.peak, threads)]
        self.display.header(f"{self.task.name} on {self.world.world_size} x {self.world.device.type}", rows)
        run, before = None, {}
        if self.world.rank == 0:
            before = predicted(self.config, self.layout, self.task.shape, self.world, threads=threads)
            plan = {"layout": str(self.layout), "derived": rows, "predicted": before}
            run = Run.open(where(self.resume)[0]) if self.resume else Run.create(self.config, plan)
        if run is not None:
            self._watch.keeps(run.path)
        if run is not None and self.profile is not None:
            run.write("profile.json", self.profile.to_json())
        checkpoints = self._checkpoints(run)
        try:
            first = self._resumed(checkpoints, run) if self.resume else 0
            self._begin(run, first)
            with self.display:
                summary = self._steps(run, checkpoints, first)
                with self.engine.averaged():
                    sample = self.task.sample(self.engine)
                self.engine.drain()
            if run is not None:
                run.log("end", **summary.facts(), sample=sample)
                measured = correct.compared(before, self._seconds, self._memory)
                run.write(correct.FILE, json.dumps(measured, indent=2) + "\n")
                results = [*self._results(summary), ("step", correct.told(measured))]
                self.display.summary(f"done: {run.path}", results, prompt=self.config.sample.prompt, sample=sample)
        finally:
            checkpoints.close()
            self.engine.close()
            if run is not None:
                run.close()
        return summary

    def _checkpoints(self, run: Run | None) -> Checkpoints:
        def tell(kind: str, facts: dict[str, Any]) -> None:
            if run is not None:
                run.log(kind, **facts)

        path = run.path if run is not None else None
        return Checkpoints(self.config, self.engine, path, resumes=bool(self.resume), tell=tell)

    def _begin(self, run: Run | None, first: int) -> None:
        """An attempt at the run begins after so many steps; what others did before it counts for goodput."""
        start: dict[str, Any] = {"kind": "start", "time": self._clock, "after": first}
        if run is not None:
            self._told = [record for record in run.records() if record["kind"] in ("start", "step")]
            run.log(**start)
        self._told.append(start)

    def _resumed(self, checkpoints: Checkpoints, run: Run | None) -> int:
        """How many steps are done."""
        loaded = checkpoints.restore(where(self.resume)[1])
        step = loaded.index.step if loaded is not None else 0
        if step >= self.config.steps:
            raise ValueError(f"the run is through (step {step} of {self.config.steps}); set steps to more")
        if loaded is None:
            self.display.note("there is no checkpoint yet: the run starts anew")
        else:
            self.display.note(f"goes on after step {step}: state {loaded.hash}, {loaded.nbytes:,} bytes read here")
        if run is not None:
            run.log("resume", step=step, layout=str(self.layout), hash=loaded.hash if loaded is not None else None)
        return step

    def _steps(self, run: Run | None, checkpoints: Checkpoints, first: int) -> Summary:
        config = self.config
        eval_loss: float | None = None
        pipeline = self.engine.pipeline
        untold: deque[_Step] = deque()
        # A GPU works on a step while the host queues the next; ranks of an asynchronous schedule end a step at
        # different times. Told one step later, nobody waits for it.
        late = self.world.device.type == "cuda" or (pipeline is not None and pipeline.asynchronous)
        for step in range(first, config.steps):
            self._stopwatch.begin()
            here.step = step + 1
            lr = learning_rate(step, config.steps, config)
            last = step + 1 == config.steps
            if pipeline is not None and last:
                pipeline.record()
            with here.loading():
                microbatches = self.task.microbatches(self.engine, step)
            result = self.engine.run(microbatches, lr=lr)
            looks = step % EVERY == 0 or last
            look = self._looks.ask(metrics.peak_memory(self.world.device)) if looks else None
            # Only the first rank tells.
            loads = self.engine.loads.ask() if self.world.rank == 0 else list
            untold.append(_Step(step + 1, result, lr, look, loads))
            evaluates = config.eval.every and ((step + 1) % config.eval.every == 0 or last)
            kept = int(late and not last and not evaluates)
            self._tell([untold.popleft() for _ in range(len(untold) - kept)], run)
            if pipeline is not None and last:
                found = pipeline.recorded()
                if found is not None and run is not None:
                    timeline.write(run.path, *found)
                begun = time.perf_counter()
                self.engine.drain()
                self._seconds[-1] += time.perf_counter() - begun  # what steps have left to do is a part of them
            checkpoints.after(step + 1, last=last)
            if evaluates:
                with here.during("evaluation"):
                    eval_loss = self.engine.evaluate(self.task.evaluation(self.engine))
                if eval_loss is not None:
                    self.display.evaluation(step + 1, eval_loss)
                    if run is not None:
                        run.log("evaluation", step=step + 1, loss=eval_loss)
        spent = self._spent()
        steady = self._seconds[1:] or self._seconds  # the first step allocates, and would spoil the mean
        rate = self._tokens(result) * len(steady) / sum(steady)
        mfu, hfu = self._utilisation(rate)
        return Summary(
            run="" if run is None else str(run.path),
            steps=config.steps,
            loss=result.loss,
            tokens_per_s=rate,
            mfu=mfu,
            hfu=hfu,
            goodput=spent.share,
            eval_loss=eval_loss,
            time=spent.record(),
            checkpoint=checkpoints.end(),
            experts={**self._experts.facts(), "dropped_in_run": self._dropped} if self._experts else None,
        )

    def _tell(self, steps: Sequence[_Step], run: Run | None) -> None:
        """Waits for steps, shows and logs them; raises where too many in a row had gradients that are not finite."""
        for step in steps:
            step.result.wait()
        if steps:
            seconds = self._stopwatch.end(len(steps))
        for step in steps:
            self._seconds.append(seconds)
            self._tell_one(step, seconds, run)

    def _tell_one(self, step: _Step, seconds: float, run: Run | None) -> None:
        result = step.result
        waiting, data = self._looks.step(seconds)
        if step.look is not None:
            self._tell_look(step.number, step.look(), run)
        loads = step.loads()
        if loads:
            self._experts = Balance.of(loads)
            self._dropped += self._experts.dropped
        progress = self._progress(step.number, result, self._tokens(result) / seconds)
        self.display.step(progress)
        not_finite = self.engine.not_finite(result)
        if not_finite is not None:
            self.display.note(f"step {step.number} skipped: {_told(result, not_finite)}")
        elif result.skipped:
            self.display.note(f"step {step.number} had no valid target: nothing was updated")
        counted = {"step": step.number, "skipped": result.skipped, "seconds": seconds, "waiting": waiting, "data": data}
        self._told.append({"kind": "step", **counted})
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
            )
            if not_finite is not None:
                run.log("not finite", step=step.number, **not_finite.record(), next_loss_scale=result.next_loss_scale)
            if loads:
                kept = keeps_counts(step.number)
                run.log("experts", step=step.number, layers=[load.record(with_counts=kept) for load in loads])
        self._count_skips(step, not_finite)

    def _count_skips(self, step: _Step, not_finite: NotFinite | None) -> None:
        """All ranks are told the same, and stop together."""
        if not_finite is None:
            self._skips = 0 if step.result.count else self._skips
            return
        self._skips += 1
        fixed = self.config.loss_scaling == "fixed"
        lower = "precision.loss_scale or optimizer.lr" if fixed else "optimizer.lr"
        if self.engine.in_backward is not None:
            raise ValueError(
                f"updates in backward cannot be left out, and step {step.number} had gradients that are not finite: "
                f"{_told(step.result, not_finite)}; lower {lower}, or use optimizer.in_backward=false"
            )
        nothing = self._skips == step.number == self.config.steps
        if self._skips < self.config.precision.skips and not nothing:
            return
        layer = f" (first in {not_finite.layer})" if not_finite.layer else ""
        raise ValueError(
            f"training diverged: {self._skips} step(s) in a row up to step {step.number} had gradients that are not "
            f"finite{layer}, and updated nothing; the last one: {_told(step.result, not_finite)}. Lower {lower}, "
            "set clip, or in 16 bits keep that layer in float32 (precision.keep_fp32)"
        )

    def _tokens(self, result: StepResult) -> int:
        """What a step's rate counts: tokens of text, or valid targets of a user's module."""
        return self.config.batch * self.config.seq_len if self.task.shape else result.count

    def _tell_look(self, step: int, look: Look, run: Run | None) -> None:
        """Who is slow is logged every time, and told when it lasts."""
        self._memory = look.memory
        if run is None or not look.steps or self.world.world_size == 1:
            return
        run.log("ranks", step=step, **look.record())
        if look.steps < ENOUGH:
            return
        for note in self._slow.notes(look.straggler, look.starved, self._looks.position):
            self.display.note(note)

    def _spent(self) -> Goodput:
        now = self._clock + time.perf_counter() - self.started
        return goodput(self._told, now=now)

    def _progress(self, step: int, result: StepResult, rate: float) -> Progress:
        mfu, hfu = self._utilisation(rate)
        return Progress(
            step=step,
            loss=result.loss,
            tokens_per_s=rate,
            mfu=mfu,
            hfu=hfu,
            memory=self._memory,
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
        peak = self.peak.flops * self.world.world_size
        return metrics.mfu(flops, rate, peak), metrics.hfu(flops, rate, peak, recomputed=again)

    def _results(self, summary: Summary) -> list[tuple[str, str]]:
        return [
            ("loss", number(summary.loss)),
            *([("evaluation", number(summary.eval_loss))] if summary.eval_loss is not None else []),
            ("tokens/s", short(summary.tokens_per_s)),
            ("MFU, HFU", f"{percent(summary.mfu)}, {percent(summary.hfu)}"),
            *self._results_of_experts(),
            ("time", f"{duration(time.perf_counter() - self.started)}, {self._spent().told()}"),
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
