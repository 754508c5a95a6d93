"""What hangs on the training loop: evaluation, checkpoints, rollback, graceful stop, the timeline of a pipeline.

A callback's hooks run on every rank, in the order of `TrainingLoop.callbacks`. Steps count from 1.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from echelon.faults.graceful_stop import GracefulStop
from echelon.pipeline import timeline
from echelon.pipeline.execution.pipeline import Pipeline
from echelon.training.guard.loss_spikes import Spike

if TYPE_CHECKING:
    from echelon.training.loop import TrainingLoop


class LoopCallback:
    """Hooks around a step; each does nothing by default."""

    def before_step(self, step: int) -> None:
        """Called before the step is queued."""

    def needs_result(self, step: int) -> bool:
        """Whether the loop must read and log this step's result before `after_step`, even if results are read late."""
        return False

    def after_step(self, step: int) -> None:
        """Called after the step is queued, unless the loop rolls back."""

    def on_rollback(self) -> None:
        """Called before the loop returns to an earlier step."""


class TimelineRecording(LoopCallback):
    """Records the actions of the last step of a pipeline, and counts what is still in flight as part of that step."""

    def __init__(self, loop: TrainingLoop, pipeline: Pipeline):
        self._loop, self._pipeline, self._is_recording = loop, pipeline, False

    def before_step(self, step: int) -> None:
        if self._loop.is_last(step):
            self._pipeline.start_recording()
            self._is_recording = True

    def after_step(self, step: int) -> None:
        if not self._is_recording:
            return
        timelines, logger = self._pipeline.finish_recording(), self._loop.logger
        if timelines is not None and logger.run is not None:
            timeline.write_timelines(logger.run.path, *timelines)
        start = time.perf_counter()
        self._loop.engine.drain()
        logger.step_seconds[-1] += time.perf_counter() - start

    def on_rollback(self) -> None:
        if self._is_recording:
            self._pipeline.finish_recording()
            self._is_recording = False


class Checkpointing(LoopCallback):
    """Saves after every `checkpoint.every` steps and after the last, but no step that a spike may still undo."""

    def __init__(self, loop: TrainingLoop):
        self._loop = loop

    def needs_result(self, step: int) -> bool:
        due = self._loop.checkpoints.is_due(step, last=self._loop.is_last(step))
        return self._loop.logger.spike_detector.is_enabled and due

    def after_step(self, step: int) -> None:
        logger, is_last = self._loop.logger, self._loop.is_last(step)
        if is_last or not (logger.spike_detector.rolls_back and logger.consecutive_skips):
            self._loop.checkpoints.after_step(step, last=is_last)


class StopOnSignal(LoopCallback):
    """Saves and ends the run after SIGTERM; all ranks stop after the same step (faults/graceful_stop.py)."""

    def __init__(self, loop: TrainingLoop, graceful_stop: GracefulStop):
        self._loop, self._graceful_stop = loop, graceful_stop
        graceful_stop.reads_results_late = loop.reads_results_late

    def before_step(self, step: int) -> None:
        self._graceful_stop.before_step(step)

    def after_step(self, step: int) -> None:
        if not self._graceful_stop.should_stop_after(step) or self._loop.is_last(step):
            return
        spike = self._loop.logger.log_pending()
        completed = step if spike is None else roll_back(self._loop, spike)
        self._loop.checkpoints.save_at_stop(completed)
        self._loop.stopped_after = completed


class Evaluation(LoopCallback):
    """Evaluates after every `eval.every` steps and after the last."""

    def __init__(self, loop: TrainingLoop):
        self._loop = loop
        self.loss: float | None = None
        """of the last evaluation"""

    def needs_result(self, step: int) -> bool:
        every = self._loop.config.eval.every
        return bool(every) and (step % every == 0 or self._loop.is_last(step))

    def after_step(self, step: int) -> None:
        loop = self._loop
        if not self.needs_result(step) or loop.stopped_after is not None:
            return
        with loop.engine.recorder.phase_scope("evaluation"):
            self.loss = loop.engine.evaluate(loop.task.eval_microbatches(loop.engine))
        if self.loss is not None:
            loop.display.print_evaluation(step, self.loss)
            loop.logger.log("evaluation", step=step, loss=self.loss)


def roll_back(loop: TrainingLoop, spike: Spike) -> int:
    """Return from a loss spike to the checkpoint before it, and skip its batches; return the completed steps."""
    loop.logger.log_pending()
    for callback in loop.callbacks:
        callback.on_rollback()
    detector = loop.logger.spike_detector
    detector.count_rollback(spike)
    num_batches = max(spike.last - spike.first + 1, loop.config.spike.skip)
    skipped = [loop.batch_index.batch_of_step(step) for step in range(spike.first, spike.first + num_batches)]
    loaded = loop.checkpoints.roll_back(spike.first)
    loop.batch_index.skip(skipped)
    detector.load_state_dict(loaded.index.fact("spikes", dict, {}))
    loop.checkpoints.save_now(loaded.index.step)
    loop.logger.log_rollback(loaded.index.step, skipped)
    return loaded.index.step
