"""A worker thread on the host, beside the device's work, and handles to wait for its jobs.

It runs jobs in the order they are submitted. An exception in a job is raised where its `JobHandle` is waited for, and
later jobs do not run. The thread ends with its owner; it holds nothing but its jobs.
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
    """A submitted job."""

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
        """Wait until the job is done; raise its exception."""
        self._event.wait()
        if self.error is not None:
            error_type = ValueError if isinstance(self.error, ValueError) else RuntimeError
            raise error_type(f"{self.description} failed on the host: {self.error}") from self.error


FINISHED = JobHandle(done=True)


class HostWorker:
    """The worker thread."""

    def __init__(self, name: str):
        self._jobs: queue.SimpleQueue[tuple[Job, JobHandle] | None] = queue.SimpleQueue()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=_work, args=(self._jobs, self._failed), name=name, daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._jobs, self._thread)

    def submit(self, description: str, job: Job) -> JobHandle:
        """Submit a job; errors name it by its `description`."""
        if not self._finalizer.alive:
            raise ValueError(f"cannot run {description}: the engine is closed; create a new engine")
        handle = JobHandle(description)
        self._jobs.put((job, handle))
        return handle

    def stop(self) -> None:
        """Stop when all jobs are done."""
        self._finalizer()


def _work(jobs: queue.SimpleQueue[tuple[Job, JobHandle] | None], failed: list[BaseException]) -> None:
    while (submitted := jobs.get()) is not None:
        job, handle = submitted
        if not failed:
            try:
                job()
            except BaseException as error:  # its handle raises it
                traceback.clear_frames(error.__traceback__)  # frames would keep the job's tensors alive
                failed.append(error)
        handle.finish(failed[0] if failed else None)
        del submitted, job, handle  # release references while the thread waits


def _stop(jobs: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()
