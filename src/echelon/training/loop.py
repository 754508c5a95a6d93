"""The training loop, as every rank runs it: steps, evaluation, a sample of text, one log."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from echelon.config.pipeline_rules import MEASURE
from echelon.config.run_config import Config
from echelon.faults.flight_recorder import here
from echelon.faults.graceful_stop import Stopping
from echelon.faults.injection_spec import Injection
from echelon.faults.injector import Injector
from echelon.faults.watchdog import Watch, watched
from echelon.launch.world import World, join
from echelon.layout import Mesh, check
from echelon.parallel.apply import WORLD, Options
from echelon.pipeline import timeline
from echelon.pipeline.execution.layer_timing import everywhere, measured_split, profile_of
from echelon.pipeline.layer_profile import Profile
from echelon.planning.calibrate import correction
from echelon.training.batch_index import Batches
from echelon.training.elastic.attempts import Attempt, met
from echelon.training.engine import Engine
from echelon.training.engine_options import loss_scale_of, options_of
from echelon.training.guard import bit_flip, deterministic
from echelon.training.guard.loss_spikes import Spike
from echelon.training.guard.replay_check import Replay
from echelon.training.logging import metrics
from echelon.training.logging.display import Display
from echelon.training.logging.rank_stats import EVERY, Looks, position
from echelon.training.logging.run_summary import Summary
from echelon.training.logging.step_logger import Step, Telling
from echelon.training.lr_schedule import learning_rate
from echelon.training.prediction import predicted, working_bytes
from echelon.training.resolved_settings import derived
from echelon.training.resume import refuse_lost, refuse_running, where
from echelon.training.run_checkpoints import Checkpoints
from echelon.training.run_dir import Run
from echelon.training.task import task_of


def train_here(config: Config, quiet: bool = False, inject: Sequence[Injection] = (), resume: str = "") -> Summary:
    """Trains on the ranks this process was started among: all of them call this, rank 0's summary names the run."""
    attempt, meeting = met(config, resume)
    if meeting is not None and attempt.ranks is not None and meeting.rank >= attempt.ranks:
        meeting.idle()
        raise SystemExit(0)
    config = attempt.config
    if config.replay.every:
        deterministic.prepare()
    with (
        join(config.device, config.timeout, meeting=meeting, ranks=attempt.ranks) as world,
        watched(world, config.timeout) as watch,
        Stopping(watch.board, rank=world.rank, world=world.world_size, listens=watch.listens) as stopping,
        Injector(attempt.strikes(inject, world.world_size), world.rank, on_strike=watch.injected).armed(),
    ):
        if attempt.resume and world.rank == 0:
            watch.keeps(where(attempt.resume)[0])  # what is said of a failure has a log from now on
        summary = Loop(config, world, quiet=quiet, watch=watch, attempt=attempt, stopping=stopping).run()
    if meeting is not None:
        meeting.is_over()
    return summary


class Loop:
    """One rank's part of a run."""

    def __init__(
        self, config: Config, world: World, *, quiet: bool, watch: Watch, attempt: Attempt, stopping: Stopping
    ):
        self.config, self.world, self._watch, self.resume = config, world, watch, attempt.resume
        self._attempt, self._stopping = attempt, stopping
        self.started = time.perf_counter()
        lane = here.lane(range(world.world_size))
        self.task = task_of(config, world.first_rank_first(lambda: here.doing("barrier", "world", lane)))
        self.layout = check(
            config.layout, world=world.world_size, batch=config.batch, seq_len=config.seq_len, model=self.task.shape
        )
        watch.stands(position(Mesh(self.layout), world.rank))
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
        self.batches = Batches(config.data.skip_batches)
        self.peak = metrics.peak_flops(world.device)
        self.display = Display(config.steps, quiet=quiet or world.rank > 0)

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
            plan = {"layout": str(self.layout), "derived": rows, "predicted": before, **self._attempt.facts()}
            run = Run.open(where(self.resume)[0]) if self.resume else Run.create(self.config, plan)
            if self._attempt.number:
                run.claim()  # who had it is gone, or is being ended
            else:
                refuse_running(run)
        if run is not None:
            self._watch.keeps(run.path)
        self._attempt.tell(run, self.display)
        if run is not None and self.profile is not None:
            run.write("profile.json", self.profile.to_json())
        telling = Telling(
            self.config,
            self.world,
            self.task,
            self.engine,
            display=self.display,
            looks=self._looks,
            peak=self.peak,
            started=self.started,
            run=run,
        )
        if self.config.replay.every:
            Replay(self.engine, self.config.replay, telling.corrupted)
        bit_flip.arm(self.engine.parallel)
        checkpoints = self._checkpoints(run, telling)
        try:
            first = self._resumed(checkpoints, telling) if self.resume else 0
            if telling.spikes.goes_back and not first:
                checkpoints.now(0)  # a spike before the first checkpoint has somewhere to go back to
            telling.begins(first, **self._attempt.facts())
            with self.display:
                summary = self._steps(telling, checkpoints, first)
                if summary.stopped is not None:
                    self._stopped(run, summary)
                    return summary
                with self.engine.averaged():
                    sample = self.task.sample(self.engine)
                self.engine.drain()
            if run is not None:
                run.log("end", **summary.facts(), sample=sample)
                measured = correction.compared(before, telling.seconds, telling.memory)
                run.write(correction.FILE, json.dumps(measured, indent=2) + "\n")
                results = [*telling.results(summary), ("step", correction.told(measured))]
                self.display.summary(f"done: {run.path}", results, prompt=self.config.sample.prompt, sample=sample)
        finally:
            checkpoints.close()
            self.engine.close()
            if run is not None:
                run.close()
        return summary

    def _stopped(self, run: Run | None, summary: Summary) -> None:
        if run is not None:
            run.log("stopped", step=summary.stopped, signal="SIGTERM", checkpoint=summary.checkpoint, time=time.time())
            again = f"go on with: echelon train --resume {run.path}"
            self.display.note(f"stopped by SIGTERM after step {summary.stopped}; {again}")

    def _checkpoints(self, run: Run | None, telling: Telling) -> Checkpoints:
        def tell(kind: str, facts: dict[str, Any]) -> None:
            if run is not None:
                run.log(kind, **facts)

        def more(step: int) -> dict[str, Any]:
            """The data's cursor: it is the step where nothing is skipped."""
            cursor = {"samples": (self.batches.of(step + 1) - 1) * self.config.batch}
            return {**cursor, "skipped_batches": list(self.batches.skipped), "spikes": telling.spikes.facts()}

        path = run.path if run is not None else None
        return Checkpoints(self.config, self.engine, path, resumes=bool(self.resume), tell=tell, more=more)

    def _resumed(self, checkpoints: Checkpoints, telling: Telling) -> int:
        """How many steps are done."""
        run = telling.run
        loaded = checkpoints.restore(where(self.resume)[1])
        step = loaded.index.step if loaded is not None else 0
        if step >= self.config.steps:
            raise ValueError(f"the run is through (step {step} of {self.config.steps}); set steps to more")
        if loaded is None:
            if run is not None:
                refuse_lost(run, checkpoints.address)
            self.display.note("there is no checkpoint yet: the run starts anew")
        else:
            self.batches.resumed(loaded.index.facts.get("skipped_batches", ()), step)
            telling.spikes.restore(loaded.index.facts.get("spikes", {}))
            self.display.note(f"goes on after step {step}: state {loaded.hash}, {loaded.nbytes:,} bytes read here")
        if run is not None:
            run.log("resume", step=step, layout=str(self.layout), hash=loaded.hash if loaded is not None else None)
        return step

    def _back(self, spike: Spike, telling: Telling, checkpoints: Checkpoints) -> int:
        """From a spike to the checkpoint before it, without its batches; how many steps are done then."""
        telling.spikes.count(spike)
        many = max(spike.last - spike.first + 1, self.config.spike.skip)
        skipped = [self.batches.of(step) for step in range(spike.first, spike.first + many)]
        loaded = checkpoints.back(spike.first)
        self.batches.skip(skipped)
        telling.spikes.restore(loaded.index.facts.get("spikes", {}))
        checkpoints.now(loaded.index.step)
        telling.went_back(loaded.index.step, skipped)
        return loaded.index.step

    def _steps(self, telling: Telling, checkpoints: Checkpoints, first: int) -> Summary:
        config, run = self.config, telling.run
        eval_loss: float | None = None
        pipeline = self.engine.pipeline
        untold: deque[Step] = deque()
        # A GPU works on a step while the host queues the next; ranks of an asynchronous schedule end a step at
        # different times. Told one step later, nobody waits for it.
        late = self.world.device.type == "cuda" or (pipeline is not None and pipeline.asynchronous)
        self._stopping.late = late
        step = first
        while step < config.steps:
            self._stopping.before(step + 1)
            telling.stopwatch.begin()
            here.step = step + 1
            lr = learning_rate(step, config.steps, config)
            last = step + 1 == config.steps
            if pipeline is not None and last:
                pipeline.record()
            with here.loading():
                batch = self.batches.of(step + 1)
                load = partial(self.task.microbatches, self.engine, step, batch - 1)
                microbatches = load()
            result = self.engine.run(microbatches, lr=lr)
            looks = step % EVERY == 0 or last
            look = self._looks.ask(metrics.peak_memory(self.world.device)) if looks else None
            # Only the first rank tells.
            loads = self.engine.loads.ask() if self.world.rank == 0 else list
            untold.append(Step(step + 1, result, lr, look, loads, batch, load))
            evaluates = config.eval.every and ((step + 1) % config.eval.every == 0 or last)
            # What is saved is known to be good before it is.
            saves = telling.spikes.looks and checkpoints.due(step + 1, last=last)
            kept = int(late and not last and not evaluates and not saves)
            spike = telling.tell([untold.popleft() for _ in range(len(untold) - kept)])
            if spike is not None:
                telling.tell(untold)
                untold.clear()
                if pipeline is not None and last:
                    pipeline.recorded()
                step = self._back(spike, telling, checkpoints)
                continue
            if pipeline is not None and last:
                found = pipeline.recorded()
                if found is not None and run is not None:
                    timeline.write(run.path, *found)
                begun = time.perf_counter()
                self.engine.drain()
                telling.seconds[-1] += time.perf_counter() - begun  # what steps have left to do is a part of them
            if last or not (telling.spikes.goes_back and telling.skips):
                checkpoints.after(step + 1, last=last)
            if self._stopping.is_due(step + 1) and not last:
                spike = telling.tell(untold)
                done = step + 1 if spike is None else self._back(spike, telling, checkpoints)
                checkpoints.at_stop(done)
                return telling.summary(result, eval_loss=eval_loss, checkpoint=checkpoints.end(), stopped=done)
            if evaluates:
                with here.during("evaluation"):
                    eval_loss = self.engine.evaluate(self.task.evaluation(self.engine))
                if eval_loss is not None:
                    self.display.evaluation(step + 1, eval_loss)
                    if run is not None:
                        run.log("evaluation", step=step + 1, loss=eval_loss)
            step += 1
        return telling.summary(result, eval_loss=eval_loss, checkpoint=checkpoints.end())
