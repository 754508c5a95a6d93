"""torch's elastic agent for the ranks of this node: it restarts them, and its observer reports why.

[Note: who receives SIGTERM, and why]

1. A rank failed: torch sends SIGTERM to the others. They find a peer gone, and exit at once (faults/graceful_stop.py).
2. The scheduler sends it to this launcher. If the function is stoppable, the launcher requests a graceful stop and
   waits: the ranks save and exit. A second SIGTERM kills every rank.
3. The scheduler sends it to all processes: each rank handles it as in 2, without the launcher.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from echelon import compat
from echelon.launch import forkserver, scratch_dir
from echelon.launch.rank_failure import RankError
from echelon.launch.world import LOOPBACK

POLL_S = 0.1
"""seconds between two checks of the ranks"""
RENDEZVOUS_TIMEOUT_S = 900
"""torch requires a timeout, although no other agent joins"""

ErrorFactory = Callable[[Mapping[int, Any], int], RankError]
"""(torch's failures by rank, number of the attempt) -> the error to raise"""
OnRestart = Callable[[RankError, int], None]
"""called before a restart with its cause and its number"""


class AgentObserver:
    """Reacts to the agent's starts and failures: counts attempts, forwards stop requests, refuses useless restarts."""

    def __init__(self, folder: Path, make_error: ErrorFactory, on_restart: OnRestart | None, *, is_stoppable: bool):
        self.folder, self._make_error, self._on_restart, self._stoppable = folder, make_error, on_restart, is_stoppable
        self.attempt = -1
        self.stopping = self.interrupted = False

    def on_start(self) -> None:
        self.attempt += 1
        if threading.current_thread() is threading.main_thread():  # in place of the agent's own
            signal.signal(signal.SIGINT, self._handle_sigint)
            if self._stoppable:
                signal.signal(signal.SIGTERM, self._handle_sigterm)
        if self.stopping:  # requested after a failure, when no rank was running
            self._request_stop()

    def on_failure(self, failures: Mapping[int, Any]) -> None:
        """Raise instead of restarting if the run is stopping, or if the user's input causes the failure."""
        error = self._make_error(failures, self.attempt)
        if self.stopping or error.is_refusal:
            raise error
        if self._on_restart is not None:
            self._on_restart(error, self.attempt + 1)

    def _handle_sigint(self, number: int, frame: object) -> None:
        if not self.interrupted:  # else the ranks are being ended, which takes a bounded time
            self.interrupted = True
            raise SignalException("interrupted", signal.SIGINT)

    def _handle_sigterm(self, number: int, frame: object) -> None:
        if self.stopping:
            raise SignalException("a second SIGTERM", signal.SIGKILL)
        self.stopping = True
        self._request_stop()

    def _request_stop(self) -> None:
        scratch_dir.request_stop(scratch_dir.attempt_dir(self.folder, self.attempt))


def run_agent(
    entry: Callable[..., Any],
    args: tuple[Any, ...],
    num_ranks: int,
    observer: AgentObserver,
    max_restarts: int,
    run_id: str,
) -> dict[int, Any]:
    """Run a function on ranks of this node; returns their values by rank.

    Raises ChildFailedError, SignalException, or what the observer raises.
    """
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=f"{LOOPBACK}:0",
            run_id=run_id,
            min_nodes=1,
            max_nodes=1,
            local_addr=LOOPBACK,
            timeout=RENDEZVOUS_TIMEOUT_S,
        )
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        entrypoint=entry,
        args=args,
        rdzv_handler=handler,
        max_restarts=max_restarts,
        monitor_interval=POLL_S,
        local_addr=LOOPBACK,
    )
    logs = DefaultLogsSpecs(log_dir=str(observer.folder / "elastic"))
    agent = compat.observed_elastic_agent(observer)(spec, logs_specs=logs, start_method=forkserver.METHOD)
    try:
        result = agent.run()
        if result.is_failed():
            raise ChildFailedError(name=getattr(entry, "__qualname__", ""), failures=result.failures)
        values: dict[int, Any] = result.return_values
        return values
    finally:
        handler.shutdown()
