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

from echelon.config.config_rules import MEASURE
from echelon.config.lr_schedule import learning_rate
from echelon.config.run_config import Config
from echelon.faults.flight_recorder import FlightRecorder
from echelon.faults.graceful_stop import GracefulStop
from echelon.faults.injection_spec import Injection
from echelon.faults.injector import Injector
from echelon.faults.watchdog import Watchdog, watch_run
from echelon.launch.world import World, join_process_group
from echelon.layout import Mesh, check_layout
from echelon.parallel.comm.axis_names import WORLD_AXIS
from echelon.parallel.parallel_options import ParallelOptions
from echelon.pipeline import timeline
from echelon.pipeline.execution.layer_timing import broadcast_profile, measure_profile, measure_split
from echelon.pipeline.layer_profile import PipelineProfile
from echelon.planning.calibrate import correction
from echelon.training.elastic.attempts import Attempt, join_attempt
from echelon.training.engine import Engine
from echelon.training.engine_options import loss_scale_settings, parallel_options
from echelon.training.guard import bit_flip, deterministic
from echelon.training.guard.loss_spikes import Spike
from echelon.training.guard.replay_check import ReplayCheck
from echelon.training.logging import metrics
from echelon.training.logging.display import Display
from echelon.training.logging.rank_stats import COLLECT_EVERY, RankStatsCollector, mesh_position
from echelon.training.logging.resolved_settings import resolved_settings
from echelon.training.logging.step_logger import PendingStep, RunSummary, StepLogger
from echelon.training.run.batch_index import BatchIndex
from echelon.training.run.prediction import choose_rank_order, predict_run, transient_bytes
from echelon.training.run.resume import parse_resume_path, refuse_if_checkpoints_missing, refuse_if_running
from echelon.training.run.run_checkpoints import RunCheckpoints
from echelon.training.run.run_dir import Run
from echelon.training.task import build_task


def train_on_rank(
    config: Config, quiet: bool = False, inject: Sequence[Injection] = (), resume: str = ""
) -> RunSummary:
    """Trains on the ranks this process was started among: all of them call this, rank 0's summary names the run."""
    attempt, meeting = join_attempt(config, resume)
    if meeting is not None and attempt.active_ranks is not None and meeting.rank >= attempt.active_ranks:
        meeting.idle_until_end()
        raise SystemExit(0)
    config = attempt.config
    if config.replay.every:
        deterministic.set_cublas_workspace()
    recorder = FlightRecorder()
    with (
        join_process_group(config.device, config.timeout, rendezvous=meeting, world_size=attempt.active_ranks) as world,
        watch_run(world, config.timeout, recorder) as watch,
        GracefulStop(
            watch.store, rank=world.rank, world_size=world.world_size, handles_signals=watch.handles_signals
        ) as stopping,
        Injector(
            attempt.injections(inject, world.world_size), world.rank, recorder, on_strike=watch.record_injection
        ).activate(),
    ):
        if attempt.resume and world.rank == 0:
            watch.set_run_dir(parse_resume_path(attempt.resume)[0])  # what is said of a failure has a log from now on
        summary = TrainingLoop(
            config, world, quiet=quiet, recorder=recorder, watchdog=watch, attempt=attempt, graceful_stop=stopping
        ).run()
    if meeting is not None:
        meeting.announce_end()
    return summary


class TrainingLoop:
    """One rank's part of a run."""

    def __init__(
        self,
        config: Config,
        world: World,
        *,
        quiet: bool,
        recorder: FlightRecorder,
        watchdog: Watchdog,
        attempt: Attempt,
        graceful_stop: GracefulStop,
    ):
        self.config, self.world, self._watchdog, self.resume = config, world, watchdog, attempt.resume
        self._attempt, self._graceful_stop, self._recorder = attempt, graceful_stop, recorder
        self.started = time.perf_counter()
        barriers = recorder.new_sequence(range(world.world_size))
        self.task = build_task(
            config, world.local_rank_zero_first(lambda: recorder.blocking_operation("barrier", "world", barriers))
        )
        self.layout = check_layout(
            config.layout,
            world=world.world_size,
            batch=config.batch,
            seq_len=config.seq_len,
            model=self.task.model_config,
        )
        shape = self.task.model_config
        options = replace(
            parallel_options(config, world.device),
            rank_order=choose_rank_order(config, self.layout, shape, world),
            working_bytes=transient_bytes(config, self.layout, shape, world),
        )
        mesh = Mesh(self.layout, options.rank_order)
        watchdog.set_mesh_position(mesh_position(mesh, world.rank))
        self.profile = self._profile(options) if config.pipeline.profile else None
        if self.profile is not None:
            split = measure_split(self.profile, mesh, world.device)
            options = replace(options, stage_layers=split.blocks_per_stage, layer_costs=self.profile.seconds_by_name)
        self.engine = Engine(
            self.task.build(),
            self.layout,
            config.optimizer,
            clip=config.clip,
            options=options,
            loss_scale=loss_scale_settings(config),
            recorder=recorder,
        )
        self.engine.model.train()
        axes = self.engine.parallel.axes
        self._looks = RankStatsCollector(axes[WORLD_AXIS], world.device, axes.mesh)
        self.batch_index = BatchIndex(config.data.skip_batches)
        self.peak_flops = metrics.peak_flops(world.device)
        self.display = Display(config.steps, quiet=quiet or world.rank > 0)

    def _profile(self, options: ParallelOptions) -> PipelineProfile:
        """What each layer takes: read from a file, or measured here."""
        given = self.config.pipeline.profile
        if given != MEASURE:
            return PipelineProfile.from_json(Path(given).read_text(encoding="utf-8"))
        return broadcast_profile(
            lambda: measure_profile(
                self.task.build(),
                self.task.example_inputs(self.layout.microbatch),
                device=options.device,
                dtype=options.compute_dtype,
            )
        )

    def run(self) -> RunSummary:
        threads = torch.get_num_threads()
        if self.layout.recompute.startswith("budget"):
            self.engine.rehearse_memory_budget(next(iter(self.task.microbatches(self.engine, 0))))
        rows = [*self.task.describe(), *resolved_settings(self.config, self.engine, self.peak_flops, threads)]
        self.display.print_settings(f"{self.task.name} on {self.world.world_size} x {self.world.device.type}", rows)
        run, before = None, {}
        if self.world.rank == 0:
            before = predict_run(self.config, self.layout, self.task.model_config, self.world, threads=threads)
            plan = {"layout": str(self.layout), "derived": rows, "predicted": before, **self._attempt.log_fields()}
            run = Run.open(parse_resume_path(self.resume)[0]) if self.resume else Run.create(self.config, plan)
            if self._attempt.restart_count:
                run.lock()  # who had it is gone, or is being ended
            else:
                refuse_if_running(run)
        if run is not None:
            self._watchdog.set_run_dir(run.path)
        self._attempt.log_changes(run, self.display)
        if run is not None and self.profile is not None:
            run.write("profile.json", self.profile.to_json())
        telling = StepLogger(
            self.config,
            self.world,
            self.task,
            self.engine,
            display=self.display,
            rank_stats=self._looks,
            peak_flops=self.peak_flops,
            started=self.started,
            run=run,
        )
        if self.config.replay.every:
            ReplayCheck(self.engine, self.config.replay, telling.log_corruption)
        bit_flip.arm_bit_flips(self.engine.parallel)
        checkpoints = self._checkpoints(run, telling)
        try:
            first = self._resumed(checkpoints, telling) if self.resume else 0
            if telling.spike_detector.rolls_back and not first:
                checkpoints.save_now(0)  # a spike before the first checkpoint has somewhere to go back to
            telling.log_start(first, **self._attempt.log_fields())
            with self.display:
                summary = self._steps(telling, checkpoints, first)
                if summary.stopped is not None:
                    self._stopped(run, summary)
                    return summary
                with self.engine.ema_weights():
                    sample = self.task.sample_text(self.engine)
                self.engine.drain()
            if run is not None:
                run.log("end", **summary.log_fields(), sample=sample)
                measured = correction.compare_prediction(before, telling.step_seconds, telling.peak_memory)
                run.write(correction.MEASURED_FILE, json.dumps(measured, indent=2) + "\n")
                results = [*telling.summary_rows(summary), ("step", correction.format_measured(measured))]
                self.display.print_summary(
                    f"done: {run.path}", results, prompt=self.config.sample.prompt, sample=sample
                )
        finally:
            checkpoints.close()
            self.engine.close()
            if run is not None:
                run.close()
        return summary

    def _stopped(self, run: Run | None, summary: RunSummary) -> None:
        if run is not None:
            run.log("stopped", step=summary.stopped, signal="SIGTERM", checkpoint=summary.checkpoint, time=time.time())
            again = f"go on with: echelon train --resume {run.path}"
            self.display.print_note(f"stopped by SIGTERM after step {summary.stopped}; {again}")

    def _checkpoints(self, run: Run | None, telling: StepLogger) -> RunCheckpoints:
        def tell(kind: str, facts: dict[str, Any]) -> None:
            if run is not None:
                run.log(kind, **facts)

        def more(step: int) -> dict[str, Any]:
            """The data's cursor: it is the step where nothing is skipped."""
            cursor = {"samples": (self.batch_index.batch_of_step(step + 1) - 1) * self.config.batch}
            return {
                **cursor,
                "skipped_batches": list(self.batch_index.skipped),
                "spikes": telling.spike_detector.state_dict(),
            }

        path = run.path if run is not None else None
        return RunCheckpoints(self.config, self.engine, path, resuming=bool(self.resume), log=tell, extra_facts=more)

    def _resumed(self, checkpoints: RunCheckpoints, telling: StepLogger) -> int:
        """How many steps are done."""
        run = telling.run
        loaded = checkpoints.restore(parse_resume_path(self.resume)[1])
        step = loaded.index.step if loaded is not None else 0
        if step >= self.config.steps:
            raise ValueError(f"the run is through (step {step} of {self.config.steps}); set steps to more")
        if loaded is None:
            if run is not None:
                refuse_if_checkpoints_missing(run, checkpoints.address)
            self.display.print_note("there is no checkpoint yet: the run starts anew")
        else:
            self.batch_index.restore(loaded.index.metadata.get("skipped_batches", ()), step)
            telling.spike_detector.load_state_dict(loaded.index.metadata.get("spikes", {}))
            self.display.print_note(
                f"goes on after step {step}: state {loaded.hash}, {loaded.bytes_read:,} bytes read here"
            )
        if run is not None:
            run.log("resume", step=step, layout=str(self.layout), hash=loaded.hash if loaded is not None else None)
        return step

    def _back(self, spike: Spike, telling: StepLogger, checkpoints: RunCheckpoints) -> int:
        """From a spike to the checkpoint before it, without its batches; how many steps are done then."""
        telling.spike_detector.count_rollback(spike)
        many = max(spike.last - spike.first + 1, self.config.spike.skip)
        skipped = [self.batch_index.batch_of_step(step) for step in range(spike.first, spike.first + many)]
        loaded = checkpoints.roll_back(spike.first)
        self.batch_index.skip(skipped)
        telling.spike_detector.load_state_dict(loaded.index.metadata.get("spikes", {}))
        checkpoints.save_now(loaded.index.step)
        telling.log_rollback(loaded.index.step, skipped)
        return loaded.index.step

    def _steps(self, telling: StepLogger, checkpoints: RunCheckpoints, first: int) -> RunSummary:
        config, run = self.config, telling.run
        eval_loss: float | None = None
        pipeline = self.engine.pipeline
        untold: deque[PendingStep] = deque()
        # A GPU works on a step while the host queues the next; ranks of an asynchronous schedule end a step at
        # different times. Told one step later, nobody waits for it.
        late = self.world.device.type == "cuda" or (pipeline is not None and pipeline.asynchronous)
        self._graceful_stop.reads_results_late = late
        step = first
        while step < config.steps:
            self._graceful_stop.before_step(step + 1)
            telling.stopwatch.begin()
            self._recorder.step = step + 1
            lr = learning_rate(step, config.steps, config)
            last = step + 1 == config.steps
            if pipeline is not None and last:
                pipeline.start_recording()
            with self._recorder.data_loading():
                batch = self.batch_index.batch_of_step(step + 1)
                load = partial(self.task.microbatches, self.engine, step, batch - 1)
                microbatches = load()
            result = self.engine.step_microbatches(microbatches, lr=lr)
            looks = step % COLLECT_EVERY == 0 or last
            look = self._looks.start_gather(metrics.peak_memory(self.world.device)) if looks else None
            # Only the first rank tells.
            loads = self.engine.expert_loads.start_read() if self.world.rank == 0 else list
            untold.append(PendingStep(step + 1, result, lr, look, loads, batch, load))
            evaluates = config.eval.every and ((step + 1) % config.eval.every == 0 or last)
            # What is saved is known to be good before it is.
            saves = telling.spike_detector.is_enabled and checkpoints.is_due(step + 1, last=last)
            kept = int(late and not last and not evaluates and not saves)
            spike = telling.log_steps([untold.popleft() for _ in range(len(untold) - kept)])
            if spike is not None:
                telling.log_steps(untold)
                untold.clear()
                if pipeline is not None and last:
                    pipeline.finish_recording()
                step = self._back(spike, telling, checkpoints)
                continue
            if pipeline is not None and last:
                found = pipeline.finish_recording()
                if found is not None and run is not None:
                    timeline.write_timelines(run.path, *found)
                begun = time.perf_counter()
                self.engine.drain()
                telling.step_seconds[-1] += time.perf_counter() - begun  # what steps have left to do is a part of them
            if last or not (telling.spike_detector.rolls_back and telling.consecutive_skips):
                checkpoints.after_step(step + 1, last=last)
            if self._graceful_stop.should_stop_after(step + 1) and not last:
                spike = telling.log_steps(untold)
                done = step + 1 if spike is None else self._back(spike, telling, checkpoints)
                checkpoints.save_at_stop(done)
                return telling.summary(result, eval_loss=eval_loss, checkpoint=checkpoints.finish(), stopped=done)
            if evaluates:
                with self._recorder.phase_scope("evaluation"):
                    eval_loss = self.engine.evaluate(self.task.eval_microbatches(self.engine))
                if eval_loss is not None:
                    self.display.print_evaluation(step + 1, eval_loss)
                    if run is not None:
                        run.log("evaluation", step=step + 1, loss=eval_loss)
            step += 1
        return telling.summary(result, eval_loss=eval_loss, checkpoint=checkpoints.finish())
