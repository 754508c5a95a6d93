"""A thread of the host's that works beside the device, and what others wait for.

It does jobs in the order in which it is given them. What goes wrong in one is raised where its `Turn` is waited for,
and the jobs after it are not done. The thread ends with whoever asked for it; it holds nothing but its jobs.
"""

from __future__ import annotations

import queue
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

Job = Callable[[], None]


class JobHandle:
    """Something that a worker has promised."""

    def __init__(self, description: str = "", *, done: bool = False):
        self.description = description
        self.error: BaseException | None = None
        self._event = threading.Event()
        if done:
            self._event.set()

    @property
    def is_done(self) -> bool:
        return self._event.is_set()

    def finish(self, error: BaseException | None = None) -> None:
        self.error = error
        self._event.set()

    def wait(self) -> None:
        """Until it is done; raises what went wrong."""
        self._event.wait()
        if self.error is not None:
            kind = ValueError if isinstance(self.error, ValueError) else RuntimeError
            raise kind(f"{self.description} failed on the host: {self.error}") from self.error


FINISHED = JobHandle(done=True)


class HostWorker:
    """The thread."""

    def __init__(self, name: str):
        self._jobs: queue.SimpleQueue[tuple[Job, JobHandle] | None] = queue.SimpleQueue()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=_work, args=(self._jobs, self._failed), name=name, daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._jobs, self._thread)

    def submit(self, description: str, job: Job) -> JobHandle:
        """A job for the thread; `what` says in an error what it was."""
        if not self._finalizer.alive:
            raise ValueError(f"nobody is left to do {description} (the engine is closed); make another engine")
        turn = JobHandle(description)
        self._jobs.put((job, turn))
        return turn

    def stop(self) -> None:
        """When all jobs are done."""
        self._finalizer()


def _work(jobs: queue.SimpleQueue[tuple[Job, JobHandle] | None], failed: list[BaseException]) -> None:
    while (given := jobs.get()) is not None:
        job, turn = given
        if not failed:
            try:
                job()
            except BaseException as error:  # whoever waits for it raises it
                traceback.clear_frames(error.__traceback__)  # or they would keep what the job held
                failed.append(error)
        turn.finish(failed[0] if failed else None)
        del given, job, turn  # nothing is kept while the thread waits


def _stop(jobs: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()
