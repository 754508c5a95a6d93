"""A diagnosis as one paragraph that names rank, operation and line, and as an event of the run's log."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from echelon.faults.diagnose import Diagnosis
from echelon.faults.host_memory import OOM_SHARE
from echelon.faults.rank_state import RankState
from echelon.faults.recorder_entry import RecorderEntry

MAX_RANKS = 8
"""ranks that a report lists one by one"""
MAX_FRAMES = 6
MAX_MISSED_HEARTBEATS = 3.0
"""heartbeats that a rank may miss before the report mentions it"""
DIAGNOSIS_EVENT, INJECTED_EVENT = "diagnosis", "injected"


def append_event(run: Path, fields: dict[str, Any], kind: str = DIAGNOSIS_EVENT) -> None:
    """Append a line to a run's log from outside the loop, if the log is on this node; in one write, since the log's
    owner may write too."""
    log = run / "log.jsonl"
    if log.is_file():
        record = {"kind": kind, "time": time.time(), **fields}
        line = json.dumps(record, ensure_ascii=False, separators=(", ", ": ")) + "\n"
        with suppress(OSError), open(log, "ab", buffering=0) as file:  # a full disk must not hide the failure
            file.write(line.encode("utf-8", "backslashreplace"))


def format_diagnosis(
    diagnosis: Diagnosis, states: Sequence[RankState], *, interval: float = 1.0, now: float | None = None
) -> str:
    """Format a diagnosis as one paragraph."""
    now = time.time() if now is None else now
    by_rank = {state.rank: state for state in states}
    culprits = [by_rank[rank] for rank in diagnosis.culprits if rank in by_rank]
    parts = [_format_cause(diagnosis, culprits, by_rank)]
    if diagnosis.case in ("absent", "skipped", "killed") and culprits:
        broke = diagnosis.operation is not None and diagnosis.operation.flag == "f"
        case = "lost" if diagnosis.case == "absent" and broke else diagnosis.case
        parts += [_format_culprit(culprits[0], case, interval, now)]
    parts += [_format_waiting_ranks(diagnosis, by_rank, now)]
    return " ".join(part for part in parts if part)


def diagnosis_record(diagnosis: Diagnosis, text: str) -> dict[str, Any]:
    """The fields of a diagnosis in the run's log."""
    operation = diagnosis.operation
    return {
        "case": diagnosis.case,
        "ranks": list(diagnosis.culprits),
        "collective": operation.op if operation else None,
        "number": operation.number if operation else None,
        "axis": operation.axis if operation else None,
        "site": operation.site if operation else None,
        "step": operation.step if operation else None,
        "waiting": [rank for rank, _ in diagnosis.waiting],
        "text": text,
    }


def format_rank(state: RankState) -> str:
    return f"rank {state.rank} ({state.mesh_position or 'mesh position not known yet'})"


def _format_cause(diagnosis: Diagnosis, culprits: Sequence[RankState], states: dict[int, RankState]) -> str:
    operation, actual = diagnosis.operation, diagnosis.culprit_operation
    names = _join_names([format_rank(state) for state in culprits])
    first = culprits[0] if culprits else None
    if diagnosis.case in ("raised", "killed") and first is not None:
        how = "raised" if diagnosis.case == "raised" else "ended without an exception:"
        phase = f"in {first.phase} of step {first.step}" if first.step else f"in {first.phase}, before the first step"
        memory = f"{_format_memory(first)}." if diagnosis.case == "killed" else ""
        last = _format_last_operation(first)
        return " ".join(filter(None, [f"{names} {how} {first.exit_reason.splitlines()[0]}, {phase}.", memory, last]))
    if diagnosis.case == "absent" and operation is not None:
        if operation.op == "receive":
            return f"{names} did not send what another rank waits for: {_format_operation(operation)}."
        broke = ", and the connection to it broke" if operation.flag == "f" else ""
        return f"{names} did not reach {_format_operation(operation)}{broke}."
    if diagnosis.case == "skipped" and operation is not None and actual is not None:
        return (
            f"{names} skipped {_format_operation(operation)}, or an earlier one like it: its operation number "
            f"{operation.number} is {actual.op} ({_format_tensor(actual)}, {actual.site}), which the other ranks run "
            "one later."
        )
    if diagnosis.case == "disagree" and operation is not None and actual is not None:
        others = [s for s in states.values() if s.rank not in diagnosis.culprits]
        against = f"{_join_names([format_rank(state) for state in others[:MAX_RANKS]])} ran" if others else "it is"
        return (
            f"{names} disagree{'s' if len(culprits) == 1 else ''} about number {operation.number} on axis "
            f"{operation.axis} in step {operation.step}: {against} {operation.op} ({_format_tensor(operation)}, "
            f"{operation.site}), and {actual.op} ({_format_tensor(actual)}, {actual.site}) elsewhere."
        )
    if diagnosis.case == "circle":
        return f"{names} wait for each other in a cycle: each is in an operation that another has not reached."
    named = f" ({_format_operation(operation)})" if operation is not None else ""
    return f"all ranks reached the operation they wait for{named}, and it did not complete: check the network."


def _format_operation(entry: RecorderEntry) -> str:
    where = f"called at {entry.site} in {entry.phase} of step {entry.step}"
    return f"{entry.description} ({_format_tensor(entry)}, {where})"


def _format_tensor(entry: RecorderEntry) -> str:
    return f"{entry.dtype} {entry.shape}" if entry.dtype else "no tensor"


def _format_culprit(state: RankState, case: str, interval: float, now: float) -> str:
    parts = []
    age = now - state.heartbeat_time
    if not state.heartbeat_time:
        return "It never published a heartbeat."
    if case == "absent":
        seconds = max(now - state.phase_start, 0.0)
        parts.append(f"It has been in {state.phase} of step {state.step} for {seconds:.1f} s.")
        if age > max(MAX_MISSED_HEARTBEATS * interval, 2.0):
            parts.append(f"Its last heartbeat was {age:.1f} s ago: its process is stopped, or a thread holds the GIL.")
    if state.exit_kind == "killed" and case != "killed":
        parts.append(f"Its process then died: {state.exit_reason}.")
    if case == "lost":
        parts.append(f"At its last heartbeat, {age:.1f} s ago, it was in {state.phase} of step {state.step}.")
    if state.stack and state.exit_kind != "killed" and case != "lost":
        label = "Its Python stack" if case == "absent" else "It is now at"
        parts.append(f"{label}, innermost first: {' < '.join(state.stack[:MAX_FRAMES])}.")
    elif state.stack:
        when = "Then" if case == "lost" else f"At its last heartbeat, {age:.1f} s ago,"
        parts.append(f"{when} it was at {' < '.join(state.stack[:MAX_FRAMES])}.")
    if case in ("absent", "lost"):
        parts.append(_format_last_operation(state))
    return " ".join(filter(None, parts))


def _format_last_operation(state: RankState) -> str:
    if not state.entries:
        return "It had started no operation before."
    last = state.entries[-1]
    status = {"e": "which ended", "w": "in which it waited", "f": "in which it waited", "s": "which it had started"}
    return f"Its last operation was {last.description} ({last.site}, step {last.step}), {status[last.flag]}."


def _format_memory(state: RankState) -> str:
    if not state.memory.limit_bytes:
        return ""
    text = f"Memory at its last heartbeat: {state.memory}"
    if "SIGKILL" in state.exit_reason and state.memory.used_share >= OOM_SHARE:
        return text + ", so it was probably killed for running out of memory"
    return text + (", so probably not for running out of memory" if "SIGKILL" in state.exit_reason else "")


def _format_waiting_ranks(diagnosis: Diagnosis, states: dict[int, RankState], now: float) -> str:
    if not diagnosis.waiting:
        return "No rank was waiting for it yet."
    shown = []
    for rank, entry in diagnosis.waiting[:MAX_RANKS]:
        seconds = max((entry.end_time if entry.flag == "f" else now) - entry.wait_start, 0.0)
        shown.append(f"{format_rank(states[rank])} for {seconds:.1f} s in {entry.description} at {entry.site}")
    more = len(diagnosis.waiting) - MAX_RANKS
    return f"Waiting: {'; '.join(shown)}{f'; and {more} more' if more > 0 else ''}."


def _join_names(names: Sequence[str]) -> str:
    shown = [*names[:MAX_RANKS], *([f"{len(names) - MAX_RANKS} more"] if len(names) > MAX_RANKS else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}" if shown else "no rank"
