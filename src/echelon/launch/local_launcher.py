"""Ranks on this machine, through torch's elastic launcher.

[Note: whose failure it was]

The launcher looks at its ranks ten times a second and reports one that it finds dead, with the time in whole seconds.
When several are dead by then, that is any of them. So each rank keeps its own record:

1. A rank that catches an exception writes it to a file, with a time in nanoseconds, and exits.
2. If the exception reads like the consequence of a lost peer, the rank lingers before it exits. By then the launcher
   has seen the peer, and has ended this rank too.
3. Of all records the first one that is not a consequence is told. A rank without a record was killed or aborted: the
   launcher knows its exit code.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
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
from echelon.launch.loopback import use_loopback
from echelon.launch.rank_failure import FailureExplanation, RankError, RankFailure, first_failure
from echelon.launch.serialize import deserialize, serialize

T = TypeVar("T")

LINGER_S = 2.0
"""Seconds that a rank with a lost peer waits before it exits; see the note."""
MAX_OUTPUT_LINES = 20
"""Lines of output told of a rank that died without an exception."""
FATAL_ERROR_PREFIX = "Fatal Python error"
"""Where the interpreter of an aborted rank begins to tell its stack."""


ExplainFailure = Callable[[Path, Sequence[RankFailure], int], FailureExplanation | None]
"""What may be said of failures by who knows what the ranks left in the launcher's folder; the last is their number."""
OnRestart = Callable[[RankError, int], None]
"""Is told why ranks are restarted, and for which time."""


def launch_ranks(
    function: Callable[..., T],
    args: Sequence[Any],
    num_ranks: int,
    *,
    log_dir: Path | None = None,
    explain: ExplainFailure | None = None,
    max_restarts: int = 0,
    on_restart: OnRestart | None = None,
    is_stoppable: bool = False,
    run_id: str = "",
    devices: Sequence[int] = (),
) -> T:
    """Call `function(*args)` on `procs` new ranks of this machine and return what rank 0 returns.

    The ranks find torchrun's environment variables, so `world.join()` makes them a group. Rank 0 writes to the
    console; the others write to `logs/rank1.log` and so on (default: a folder that is removed at the end). The
    function must be importable by name. Raises `RankError` with the first failure; Ctrl-C ends all ranks.

    Up to `restarts` times all ranks are started anew where one failed. A `stoppable` function looks for the word that
    place.py has of SIGTERM. `devices` are the numbers of the GPUs that ranks may use; none: all of them.
    """
    if num_ranks < 1:
        raise ValueError(f"one rank or more is needed (procs={num_ranks})")
    forkserver.await_imports()
    with tempfile.TemporaryDirectory(prefix="echelon-ranks-") as scratch:
        folder = Path(scratch)
        what = f"{function.__module__}.{function.__qualname__}"

        def error_of(seen: Mapping[int, Any], attempt: int) -> RankError:
            return _make_error(
                seen, scratch_dir.attempt_dir(folder, attempt), log_dir, num_ranks, what, explain, attempt
            )

        told = elastic_agent.AgentObserver(folder, error_of, on_restart, is_stoppable=is_stoppable)
        call = serialize((function, tuple(args)))
        try:
            with _quiet_elastic_logs(), _restored_signal_handlers():
                values = elastic_agent.run_agent(
                    _run_rank,
                    (call, str(folder), str(log_dir or ""), _visible_devices(devices)),
                    num_ranks,
                    observer=told,
                    log_dir=folder / "elastic",
                    max_restarts=max_restarts,
                    run_id=run_id or uuid.uuid4().hex,
                )
        except ChildFailedError as error:
            raise error_of(error.failures, told.attempt) from None
        except SignalException as error:
            # The launcher turns signals into this exception, and has ended the ranks.
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + (signal.SIGTERM if told.stopping else error.sigval)) from None
        value: T = deserialize(values[0])
        return value


def _run_rank(call: bytes, root: str, logs: str, visible: str) -> bytes:
    """What each rank runs."""
    # The launcher ends ranks by these signals. The default action is at once and without a traceback.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, forkserver.MASKED_SIGNALS)
    forkserver.end_with_parent()
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
        return serialize(value) if rank == 0 else b""
    except BaseException as error:
        failure = RankFailure.from_exception(error, rank)
        record = folder / f"failure{rank}.json"
        # Renamed when complete: the launcher may end this rank at any moment.
        draft = record.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(failure)))
        draft.rename(record)
        if failure.lost_peer:
            time.sleep(LINGER_S)
        sys.exit(1)


def _visible_devices(devices: Sequence[int]) -> str:
    """The variable that says which GPUs there are, with these of them."""
    shown = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(shown[number] if number < len(shown) else str(number) for number in devices)


def _make_error(
    seen: Mapping[int, Any],
    folder: Path,
    logs: Path | None,
    procs: int,
    what: str,
    explain: ExplainFailure | None,
    attempt: int,
) -> RankError:
    failures = _collect_failures(seen, folder, logs or folder)
    again = f"This was after {attempt} restart{'s' if attempt > 1 else ''}." if attempt else ""
    found = explain(folder, failures, procs) if explain is not None else None
    if found is not None:
        return RankError.from_explanation(replace(found, text=" ".join(filter(None, [found.text, again]))), failures)
    return RankError.from_failure(first_failure(failures), world_size=procs, function=what, remark=again)


def _redirect_output(path: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    # File descriptors, not sys.stdout: what C++ prints when it aborts must arrive too.
    with open(path, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _collect_failures(seen: Mapping[int, Any], folder: Path, logs: Path) -> list[RankFailure]:
    found = [RankFailure(**json.loads(path.read_text())) for path in folder.glob("failure*.json")]
    recorded = {failure.rank for failure in found}
    for rank, ended in seen.items():
        if rank not in recorded:
            found.append(RankFailure.from_exit_code(ended.exitcode, rank, _last_lines(logs / f"rank{rank}.log")))
    return found


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    fatal = max((number for number, line in enumerate(lines) if line.startswith(FATAL_ERROR_PREFIX)), default=None)
    # Below it come all the rank's calls and modules: what was printed just before, and the innermost calls, are it.
    lines = lines[-MAX_OUTPUT_LINES:] if fatal is None else lines[max(fatal - 3, 0) :][:MAX_OUTPUT_LINES]
    return "\n".join(["its last output:", *lines]) if lines else ""


@contextmanager
def _quiet_elastic_logs() -> Iterator[None]:
    """The launcher logs a page about a failure that we tell in a few lines."""
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict)]
    loggers = [
        logger for logger in loggers if logger.name.startswith(("torch.distributed.elastic", "torch.multiprocessing"))
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _restored_signal_handlers() -> Iterator[None]:
    """The launcher takes over these signals and does not give them back."""
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            if signal.getsignal(name) is not handler:
                signal.signal(name, handler)
