"""Launch ranks on this node through torch's elastic agent.

[Note: the first failure]

The agent checks its ranks ten times a second and reports one that it finds dead, with the time in whole seconds. When
several are dead by then, it may report any of them. So each rank writes its own record:

1. A rank that catches an exception writes it to a file, with a time in nanoseconds, and exits.
2. If the exception looks like the consequence of a lost peer, the rank lingers before it exits. By then the agent has
   seen the peer, and has ended this rank too.
3. The launcher reports the first record that is not a consequence. A rank without a record was killed or aborted, and
   the agent knows its exit code.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from echelon.launch import elastic_agent, forkserver, scratch_dir
from echelon.launch.process_end import end_despite_threads
from echelon.launch.rank_failure import FailureExplanation, RankError, RankFailure, first_failure
from echelon.launch.serialize import deserialize, serialize
from echelon.launch.world import refuse_bad_environment, use_loopback

T = TypeVar("T")

LINGER_S = 2.0
"""Seconds that a rank with a lost peer waits before it exits; see the note."""
MAX_OUTPUT_LINES = 20
"""Lines of output reported of a rank that died without an exception."""
FATAL_ERROR_PREFIX = "Fatal Python error"
"""The line before the stack that the interpreter of an aborted rank prints."""


ExplainFailure = Callable[[Path, Sequence[RankFailure], int], FailureExplanation | None]
"""(scratch directory of the attempt, failures, number of ranks) -> the diagnosis"""


def launch_ranks(
    function: Callable[..., T],
    args: Sequence[Any],
    num_ranks: int,
    *,
    log_dir: Path | None = None,
    explain: ExplainFailure | None = None,
    max_restarts: int = 0,
    on_restart: elastic_agent.OnRestart | None = None,
    is_stoppable: bool = False,
    run_id: str = "",
    devices: Sequence[int] = (),
) -> T:
    """Call `function(*args)` on `num_ranks` new ranks of this node and return what rank 0 returns.

    The ranks have torchrun's environment variables, so `join_process_group()` forms their group. Rank 0 writes to the
    console, the others to `log_dir/rank1.log` and so on (default: a directory that is removed at the end). The
    function must be importable by name. Raises `RankError` with the first failure; Ctrl-C ends all ranks.

    After a failure all ranks are restarted, up to `max_restarts` times. A stoppable function stops gracefully on the
    request that scratch_dir.py describes. `devices` are the GPUs that ranks may use, by default all of them.
    """
    if num_ranks < 1:
        raise ValueError(f"at least one rank is required (procs={num_ranks})")
    refuse_bad_environment(num_ranks)
    forkserver.await_imports()
    with scratch_dir.ScratchFolder("ranks") as scratch:
        folder = scratch.path

        def make_error(seen: Mapping[int, Any], attempt: int) -> RankError:
            attempt_dir = scratch_dir.attempt_dir(folder, attempt)
            failures = _collect_failures(seen, attempt_dir, log_dir or attempt_dir)
            remark = f"This was after {attempt} restart{'s' if attempt > 1 else ''}." if attempt else ""
            explanation = explain(attempt_dir, failures, num_ranks) if explain is not None else None
            if explanation is not None:
                text = " ".join(filter(None, [explanation.text, remark]))
                return RankError.from_explanation(replace(explanation, text=text), failures)
            name = f"{function.__module__}.{function.__qualname__}"
            return RankError.from_failure(first_failure(failures), world_size=num_ranks, function=name, remark=remark)

        observer = elastic_agent.AgentObserver(folder, make_error, on_restart, is_stoppable=is_stoppable)
        call = serialize((function, tuple(args)))
        rank_args = (call, str(folder), str(log_dir or ""), _visible_devices(devices))
        try:
            with _quiet_elastic_logs(), _restored_signal_handlers():
                run_id = run_id or uuid.uuid4().hex
                values = elastic_agent.run_agent(_run_rank, rank_args, num_ranks, observer, max_restarts, run_id)
        except ChildFailedError as error:
            raise make_error(error.failures, observer.attempt) from None
        except SignalException as error:
            # The agent raises this on a signal, after it has ended the ranks.
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + (signal.SIGTERM if observer.stopping else error.sigval)) from None
        value: T = deserialize(values[0])
        return value


def _run_rank(call: bytes, root: str, logs: str, visible: str) -> bytes:
    """The entry point of each rank."""
    # The agent ends ranks by these signals. The default action exits at once and without a traceback.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    forkserver.begin_rank()
    rank = int(os.environ["RANK"])
    folder = scratch_dir.attempt_dir(Path(root), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    folder.mkdir(exist_ok=True)
    if rank != 0:
        Path(logs or folder).mkdir(parents=True, exist_ok=True)
        _redirect_output(Path(logs or folder) / f"rank{rank}.log")
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    use_loopback()
    scratch_dir.set_scratch_dir(folder)
    try:
        function, args = deserialize(call)
        value = function(*args)
        end_despite_threads(0)
        return serialize(value) if rank == 0 else b""
    except BaseException as error:
        failure = RankFailure.from_exception(error, rank)
        # Renamed when complete, because the agent may end this rank at any moment.
        draft = folder / f"failure{rank}.draft"
        draft.write_text(json.dumps(asdict(failure)))
        draft.rename(draft.with_suffix(".json"))
        if failure.lost_peer:
            time.sleep(LINGER_S)
        end_despite_threads(1)
        sys.exit(1)


def _visible_devices(devices: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES restricted to these of the visible devices."""
    shown = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(shown[number] if number < len(shown) else str(number) for number in devices)


def _redirect_output(path: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    # Redirect the file descriptors, not sys.stdout, so that C++ output of an abort arrives too.
    with open(path, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _collect_failures(seen: Mapping[int, Any], folder: Path, logs: Path) -> list[RankFailure]:
    failures = [RankFailure(**json.loads(path.read_text())) for path in folder.glob("failure*.json")]
    recorded = {failure.rank for failure in failures}
    for rank, ended in seen.items():
        if rank not in recorded:
            failures.append(RankFailure.from_exit_code(ended.exitcode, rank, _last_lines(logs / f"rank{rank}.log")))
    return failures


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    fatal = max((number for number, line in enumerate(lines) if line.startswith(FATAL_ERROR_PREFIX)), default=None)
    # All of the rank's calls and modules follow: keep the lines just before it, and the innermost calls.
    lines = lines[-MAX_OUTPUT_LINES:] if fatal is None else lines[max(fatal - 3, 0) :][:MAX_OUTPUT_LINES]
    return "\n".join(["its last output:", *lines]) if lines else ""


@contextmanager
def _quiet_elastic_logs() -> Iterator[None]:
    """Silence the agent's log of a failure, which the launcher reports itself."""
    packages = ("torch.distributed.elastic", "torch.multiprocessing")
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(packages)]
    levels = {logger: logger.level for logger in loggers}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextmanager
def _restored_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that the agent replaces."""
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            if signal.getsignal(name) is not handler:
                signal.signal(name, handler)
