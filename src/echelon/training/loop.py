"""The training loop, as every rank runs it.

[Note: the walk of a run]

    train_on_rank      joins the process group, under the watchdog, and runs a `TrainingLoop`
    TrainingLoop.run   opens the run directory, resumes, trains, samples text, writes the summary
    _run_step          callbacks before; queue the step; log what is due; roll back from a spike; callbacks after
    _train_step        learning rate, microbatches, `Engine.step_microbatches`

What is optional hangs on the loop as callbacks (loop_callbacks.py), or on the engine (step_strategies.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
from echelon.models.traced.trace_on_demand import trace_if_needed
from echelon.parallel.comm.axis_names import WORLD_AXIS
from echelon.parallel.parallel_options import ParallelOptions
from echelon.pipeline.execution.layer_timing import broadcast_profile, measure_profile, measure_split
from echelon.pipeline.layer_profile import PipelineProfile
from echelon.planning.calibrate import correction
from echelon.training import loop_callbacks
from echelon.training.elastic.attempts import Attempt, join_attempt
from echelon.training.engine import Engine
from echelon.training.engine_options import loss_scale_settings, parallel_options
from echelon.training.guard import bit_flip, deterministic
from echelon.training.guard.replay_check import ReplayCheck
from echelon.training.logging import metrics
from echelon.training.logging.display import Display, ResolvedSetting
from echelon.training.logging.rank_stats import COLLECT_EVERY, RankStats, RankStatsCollector, mesh_position
from echelon.training.logging.resolved_settings import resolved_settings
from echelon.training.logging.step_logger import PendingStep, RunSummary, StepLogger
from echelon.training.run.batch_index import BatchIndex
from echelon.training.run.prediction import agree_on_rank_order, predict_run, transient_bytes
from echelon.training.run.resume import parse_resume_path, refuse_if_checkpoints_missing, refuse_if_running
from echelon.training.run.run_checkpoints import RunCheckpoints
from echelon.training.run.run_dir import Run
from echelon.training.run.run_fingerprint import compare_with_checkpoint, refuse_if_ranks_differ
from echelon.training.task import build_task


def train_on_rank(
    config: Config, quiet: bool = False, inject: Sequence[Injection] = (), resume: str = ""
) -> RunSummary:
    """Train on the ranks this process belongs to. Every rank calls this; only rank 0's summary names the run."""
    attempt, rendezvous = join_attempt(config, resume)
    if rendezvous is not None and attempt.active_ranks is not None and rendezvous.rank >= attempt.active_ranks:
        rendezvous.idle_until_end()
        raise SystemExit(0)
    config = attempt.config
    if config.replay.every:
        deterministic.set_cublas_workspace()
    recorder = FlightRecorder()
    with (
        join_process_group(
            config.device, config.timeout, rendezvous=rendezvous, world_size=attempt.active_ranks
        ) as world,
        watch_run(world, config.timeout, recorder) as watchdog,
        GracefulStop(
            watchdog.store, rank=world.rank, world_size=world.world_size, handles_signals=watchdog.handles_signals
        ) as stop,
        Injector(
            attempt.injections(inject, world.world_size), world.rank, recorder, on_strike=watchdog.record_injection
        ).activate(),
    ):
        if attempt.resume and world.rank == 0:
            watchdog.set_run_dir(parse_resume_path(attempt.resume)[0])  # a failure report goes to its log from now on
        summary = TrainingLoop(
            config, world, quiet=quiet, recorder=recorder, watchdog=watchdog, attempt=attempt, graceful_stop=stop
        ).run()
    if rendezvous is not None:
        rendezvous.announce_end()
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
        self.config, self.world, self.resume = config, world, attempt.resume
        self._watchdog, self._attempt, self._graceful_stop, self._recorder = watchdog, attempt, graceful_stop, recorder
        self.started = time.perf_counter()
        barriers = recorder.new_sequence(range(world.world_size))
        barrier_context = partial(recorder.blocking_operation, "barrier", "world", barriers)
        self.task = build_task(config, world.local_rank_zero_first(barrier_context))
        self.fingerprint = self.task.fingerprint
        refuse_if_ranks_differ(self.fingerprint, world, barrier_context())
        model, size = self.task.model_config, world.world_size
        self.layout = check_layout(config.layout, world=size, batch=config.batch, seq_len=config.seq_len, model=model)
        rank_order = agree_on_rank_order(config, self.layout, model, world)
        working_bytes = transient_bytes(config, self.layout, model, world)
        options = replace(parallel_options(config, world.device), rank_order=rank_order, working_bytes=working_bytes)
        mesh = Mesh(self.layout, rank_order)
        watchdog.set_mesh_position(mesh_position(mesh, world.rank))
        self._profile = self._layer_profile(options) if config.pipeline.profile else None
        if self._profile is not None:
            split = measure_split(self._profile, mesh, world.device)
            options = replace(options, stage_layers=split.blocks_per_stage, layer_costs=self._profile.seconds_by_name)
        self.engine = Engine(
            self.task.build(),
            self.layout,
            config.optimizer,
            clip=config.clip,
            options=options,
            loss_scale=loss_scale_settings(config),
            recorder=recorder,
            inputs=self.task.example_inputs(config.batch) if model is None else None,
        )
        self.engine.model.train()
        axes = self.engine.parallel.axes
        self.rank_stats = RankStatsCollector(axes[WORLD_AXIS], world.device, axes.mesh)
        self.batch_index = BatchIndex(config.data.skip_batches)
        self.peak_flops = metrics.peak_flops(world.device)
        self.display = Display(config.steps, quiet=quiet or world.rank > 0)
        self.stopped_after: int | None = None
        """the step after which a signal ended the run"""

    def _layer_profile(self, options: ParallelOptions) -> PipelineProfile:
        """Read the times of the layers from a file, or measure them."""
        source = self.config.pipeline.profile
        if source != MEASURE:
            return PipelineProfile.read(source)
        device, dtype = options.device, options.compute_dtype
        inputs = self.task.example_inputs
        return broadcast_profile(
            lambda: measure_profile(
                trace_if_needed(self.task.build(), self.layout, inputs(self.layout.microbatch), dtype),
                inputs(self.layout.microbatch),
                device=device,
                dtype=dtype,
            )
        )

    # -- one step -----------------------------------------------------------------------------------------------------

    def is_last(self, step: int) -> bool:
        return step == self.config.steps

    @property
    def reads_results_late(self) -> bool:
        """Whether results are read one step late, so that no rank waits for a step that is still in flight.

        A GPU executes a step while the host queues the next; ranks of an asynchronous schedule end a step at different
        times.
        """
        pipeline = self.engine.pipeline
        return self.world.device.type == "cuda" or (pipeline is not None and pipeline.asynchronous)

    def _run_step(self, step: int) -> int:
        """Train step `step`, counted from 1; return the number of completed steps."""
        for callback in self.callbacks:
            callback.before_step(step)
        self.logger.add(self._train_step(step))
        late = self.reads_results_late and not self.is_last(step)
        late = late and not any(callback.needs_result(step) for callback in self.callbacks)
        spike = self.logger.log_pending(keep=int(late))
        if spike is not None:
            return loop_callbacks.roll_back(self, spike)
        for callback in self.callbacks:
            callback.after_step(step)
        return step

    def _train_step(self, step: int) -> PendingStep:
        """Queue the step on the device, and the reading of its statistics."""
        self.logger.stopwatch.begin()
        self._recorder.step = step
        lr = learning_rate(step - 1, self.config.steps, self.config)
        with self._recorder.data_loading():
            batch = self.batch_index.batch_of_step(step)
            load = partial(self.task.microbatches, self.engine, step - 1, batch - 1)
            microbatches = load()
        self._last_result = self.engine.step_microbatches(microbatches, lr=lr)
        collects = (step - 1) % COLLECT_EVERY == 0 or self.is_last(step)
        return PendingStep(
            number=step,
            result=self._last_result,
            lr=lr,
            read_rank_stats=self._gather_rank_stats() if collects else None,
            read_expert_loads=self.engine.expert_loads.start_read() if self.world.rank == 0 else list,
            batch=batch,
            reload_microbatches=load,
        )

    def _gather_rank_stats(self) -> Callable[[], RankStats]:
        memory = metrics.peak_memory(self.world.device)
        return self.rank_stats.start_gather(memory, self.task.batch_fingerprint)

    # -- a run --------------------------------------------------------------------------------------------------------

    def run(self) -> RunSummary:
        """Train to the end, or until a signal stops the run."""
        threads = torch.get_num_threads()
        if self.layout.recompute.startswith("budget"):
            self.engine.rehearse_memory_budget(next(iter(self.task.microbatches(self.engine, 0))))
        settings = [*self.task.describe(), *resolved_settings(self.config, self.engine, self.peak_flops, threads)]
        title = f"{self.task.name} on {self.world.world_size} x {self.world.device.type}"
        self.display.print_settings(title, settings)
        run, prediction = self._open_run(settings, threads) if self.world.rank == 0 else (None, {})
        self.logger = StepLogger(self, run)
        self._attempt.log_changes(self.logger)
        if self.config.replay.every:
            ReplayCheck(self.engine, self.config.replay, self.logger.log_corruption)
        bit_flip.arm_bit_flips(self.engine.parallel)
        self.checkpoints = RunCheckpoints(
            self.config, self.engine, run, resuming=bool(self.resume), extra_facts=self._checkpoint_facts
        )
        evaluation = loop_callbacks.Evaluation(self)
        stop = loop_callbacks.StopOnSignal(self, self._graceful_stop)
        self.callbacks: list[loop_callbacks.LoopCallback] = [loop_callbacks.Checkpointing(self), stop, evaluation]
        if self.engine.pipeline is not None:
            self.callbacks.insert(0, loop_callbacks.TimelineRecording(self, self.engine.pipeline))
        try:
            step = self._restore() if self.resume else 0
            if self.logger.spike_detector.rolls_back and not step:
                self.checkpoints.save_now(0)  # a spike before the first checkpoint can roll back too
            self.logger.log_start(step, **self._attempt.log_fields())
            with self.display:
                while step < self.config.steps and self.stopped_after is None:
                    step = self._run_step(step + 1)
                saved, stopped = self.checkpoints.finish(), self.stopped_after
                summary = self.logger.summary(self._last_result, evaluation.loss, checkpoint=saved, stopped=stopped)
                if stopped is not None:
                    self._log_stop(run, summary)
                    return summary
                with self.engine.ema_weights():
                    sample = self.task.sample_text(self.engine)
                self.engine.drain()
            if run is not None:
                self._log_end(run, summary, prediction, sample)
        finally:
            self.checkpoints.close()
            self.engine.close()
            if run is not None:
                run.close()
        return summary

    def _open_run(self, settings: list[ResolvedSetting], threads: int) -> tuple[Run, dict[str, Any]]:
        """On rank 0: create or reopen the run's directory; return it and what the planner predicts for the run."""
        prediction = predict_run(self.config, self.layout, self.task.model_config, self.world, threads=threads)
        fields = self._attempt.log_fields()
        plan = {"layout": str(self.layout), "derived": settings, "predicted": prediction, **fields}
        run = Run.open(parse_resume_path(self.resume)[0]) if self.resume else Run.create(self.config, plan)
        if self._attempt.restart_count:
            run.lock()  # the process that held the lock has ended, or is being ended
        else:
            refuse_if_running(run)
        self._watchdog.set_run_dir(run.path)
        if self._profile is not None:
            run.write("profile.json", self._profile.to_json())
        return run, prediction

    def _checkpoint_facts(self, step: int) -> dict[str, Any]:
        """Return the position in the data, and the history of losses, after a step."""
        return {
            "samples": (self.batch_index.batch_of_step(step + 1) - 1) * self.config.batch,
            "skipped_batches": list(self.batch_index.skipped),
            "spikes": self.logger.spike_detector.state_dict(),
            "fingerprint": self.fingerprint.to_json(),
        }

    def _restore(self) -> int:
        """Load a checkpoint of the resumed run; return the number of completed steps."""
        run = self.logger.run
        loaded = self.checkpoints.restore(parse_resume_path(self.resume)[1])
        step = loaded.index.step if loaded is not None else 0
        if step >= self.config.steps:
            raise ValueError(f"the run is already complete (step {step} of {self.config.steps}); increase steps")
        if loaded is None:
            if run is not None:
                refuse_if_checkpoints_missing(run, self.checkpoints.address)
            self.display.print_note("no checkpoint exists yet: the run starts from the first step")
        else:
            saved = loaded.index.metadata.get("fingerprint")
            for note in compare_with_checkpoint(saved, self.fingerprint, model=self.config.model):
                self.display.print_note(note)
            self.batch_index.restore(loaded.index.fact("skipped_batches", list, []), step)
            self.logger.spike_detector.load_state_dict(loaded.index.fact("spikes", dict, {}))
            if loaded.note:
                self.display.print_note(loaded.note)
            source = f"state {loaded.hash}, this rank read {loaded.bytes_read:,} bytes"
            self.display.print_note(f"resumed after step {step}: {source}")
        state_hash = loaded.hash if loaded is not None else None
        self.logger.log("resume", step=step, layout=str(self.layout), hash=state_hash)
        return step

    def _log_stop(self, run: Run | None, summary: RunSummary) -> None:
        if run is not None:
            run.log("stopped", step=summary.stopped, signal="SIGTERM", checkpoint=summary.checkpoint, time=time.time())
            hint = f"resume with: echelon train --resume {run.path}"
            self.display.print_note(f"stopped by SIGTERM after step {summary.stopped}; {hint}")

    def _log_end(self, run: Run, summary: RunSummary, prediction: dict[str, Any], sample: str) -> None:
        run.log("end", **summary.log_fields(), sample=sample)
        measured = correction.compare_prediction(prediction, self.logger.step_seconds, self.logger.peak_memory)
        run.write(correction.MEASURED_FILE, json.dumps(measured, indent=2) + "\n")
        rows = [*self.logger.summary_rows(summary), ("step", correction.format_measured(measured))]
        self.display.print_summary(f"done: {run.path}", rows, prompt=self.config.sample.prompt, sample=sample)
