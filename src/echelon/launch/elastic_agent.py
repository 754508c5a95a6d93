"""torch's elastic agent over ranks of this machine: it restarts them, and we say what it does and why.

[Note: who is sent SIGTERM, and why]

1. A rank failed: torch sends SIGTERM to the others. They see that a peer is gone, and end at once (faults/graceful_stop.py).
2. Somebody sent it to this launcher: the machine is wanted back. Where ranks know how to stop, the launcher leaves a
   word for them and waits: they save, and end by themselves. A second one ends everything at once, by SIGKILL.
3. Somebody sent it to all processes: each rank takes it for 2, and the launcher has sent nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from echelon import compat
from echelon.launch import forkserver, scratch_dir
from echelon.launch.loopback import ADDRESS
from echelon.launch.rank_failure import RankError

POLL_S = 0.1
"""seconds between two looks at the ranks"""
RENDEZVOUS_TIMEOUT_S = 900
"""seconds that an agent waits for others, of which there are none"""

ErrorFactory = Callable[[Mapping[int, Any], int], RankError]
"""from what torch saw of failed ranks, and the number of the attempt, to what is known of it"""


class AgentObserver:
    """What the agent tells, and what is done about it."""

    def __init__(
        self,
        folder: Path,
        make_error: ErrorFactory,
        on_restart: Callable[[RankError, int], None] | None,
        *,
        is_stoppable: bool,
    ):
        self._folder, self._make_error, self._on_restart, self._stoppable = folder, make_error, on_restart, is_stoppable
        self.attempt = -1
        self.stopping = False

    def started(self) -> None:
        self.attempt += 1
        if self._stoppable and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handle_sigterm)  # in place of the agent's own
        if self.stopping:  # it was asked for after a failure, when nobody was there to be told
            self._request_stop()

    def failed(self, failures: Mapping[int, Any]) -> None:
        """Before a restart."""
        error = self._make_error(failures, self.attempt)
        if self.stopping or (error.failure is not None and error.failure.user_errors):
            raise error  # it would be the same again
        if self._on_restart is not None:
            self._on_restart(error, self.attempt + 1)

    def _handle_sigterm(self, number: int, frame: object) -> None:
        if self.stopping:
            raise SignalException("a second SIGTERM", signal.SIGKILL)
        self.stopping = True
        self._request_stop()

    def _request_stop(self) -> None:
        scratch_dir.request_stop(scratch_dir.attempt_dir(self._folder, self.attempt))


def run_agent(
    entry: Callable[..., Any],
    args: Sequence[Any],
    num_ranks: int,
    *,
    observer: AgentObserver,
    log_dir: Path,
    max_restarts: int,
    run_id: str,
) -> dict[int, Any]:
    """What each rank returns. Raises ChildFailedError, or SignalException, or what `told` raises."""
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=f"{ADDRESS}:0",
            run_id=run_id,
            min_nodes=1,
            max_nodes=1,
            local_addr=ADDRESS,
            timeout=RENDEZVOUS_TIMEOUT_S,
        )
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        entrypoint=entry,
        args=tuple(args),
        rdzv_handler=handler,
        max_restarts=max_restarts,
        monitor_interval=POLL_S,
        local_addr=ADDRESS,
    )
    agent = compat.observed_elastic_agent(observer)(
        spec, logs_specs=DefaultLogsSpecs(log_dir=str(log_dir)), start_method=forkserver.METHOD
    )
    try:
        result = agent.run()
        if result.is_failed():
            raise ChildFailedError(name=getattr(entry, "__qualname__", ""), failures=result.failures)
        values: dict[int, Any] = result.return_values
        return values
    finally:
        handler.shutdown()
