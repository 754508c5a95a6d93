"""A verdict in one paragraph, with all that a person needs to find the line."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from echelon.faults.diagnose import Diagnosis
from echelon.faults.host_memory import OOM_SHARE
from echelon.faults.rank_state import RankState
from echelon.faults.recorder_entry import RecorderEntry

MAX_RANKS = 8
"""ranks that are told one by one"""
MAX_FRAMES = 6
MAX_MISSED_HEARTBEATS = 3.0
"""heartbeats that may be missed before that is worth a word"""


def format_diagnosis(
    diagnosis: Diagnosis, states: Sequence[RankState], *, interval: float = 1.0, now: float | None = None
) -> str:
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
    """For the run's log."""
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
    place = state.mesh_position or "its mesh position is not known yet"
    return f"rank {state.rank} ({place})"


def _format_cause(verdict: Diagnosis, culprits: Sequence[RankState], states: dict[int, RankState]) -> str:
    operation, instead = verdict.operation, verdict.culprit_operation
    names = _join_names([format_rank(state) for state in culprits])
    first = culprits[0] if culprits else None
    if verdict.case in ("raised", "killed") and first is not None:
        how = "raised" if verdict.case == "raised" else "ended without an exception:"
        at = f"in {first.phase} of step {first.step}" if first.step else f"in {first.phase}, before the first step"
        memory = f"{_format_memory(first)}." if verdict.case == "killed" else ""
        last = _format_last_operation(first)
        return " ".join(filter(None, [f"{names} {how} {first.exit_reason.splitlines()[0]}, {at}.", memory, last]))
    if verdict.case == "absent" and operation is not None:
        if operation.op == "receive":
            return f"{names} did not send what another rank waits for: {_format_operation(operation)}."
        verb = "did not come" if len(culprits) == 1 else "did not come, neither of them," if len(culprits) == 2 else ""
        broke = ", and the connection to it broke" if operation.flag == "f" else ""
        return f"{names} {verb or 'did not come, none of them,'} to {_format_operation(operation)}{broke}."
    if verdict.case == "skipped" and operation is not None and instead is not None:
        return (
            f"{names} left out {_format_operation(operation)}, or one like it before: as number {operation.number} it went on to "
            f"{instead.op} ({_format_tensor(instead)}, {instead.site}), which the others do one later."
        )
    if verdict.case == "disagree" and operation is not None and instead is not None:
        others = [s for s in states.values() if s.rank not in verdict.culprits]
        against = f"{_join_names([format_rank(state) for state in others[:MAX_RANKS]])} did" if others else "it is"
        return (
            f"{names} disagree{'s' if len(culprits) == 1 else ''} about number {operation.number} on axis "
            f"{operation.axis} in step {operation.step}: {against} {operation.op} ({_format_tensor(operation)}, "
            f"{operation.site}), and {instead.op} ({_format_tensor(instead)}, {instead.site}) elsewhere."
        )
    if verdict.case == "circle":
        return f"{names} wait for each other in different operations: each is in one that another has not come to."
    named = f" ({_format_operation(operation)})" if operation is not None else ""
    return f"all ranks came to what they wait for{named}, and it did not end: look at the network between them."


def _format_operation(entry: RecorderEntry) -> str:
    return f"{entry.description} ({_format_tensor(entry)}, asked for at {entry.site} in {entry.phase} of step {entry.step})"


def _format_tensor(entry: RecorderEntry) -> str:
    return f"{entry.dtype} {entry.shape}" if entry.dtype else "no tensor"


def _format_culprit(state: RankState, case: str, beat: float, now: float) -> str:
    parts = []
    age = now - state.heartbeat_time
    if not state.heartbeat_time:
        return "It never gave a sign of life."
    if case == "absent":
        parts.append(
            f"It has been in {state.phase} of step {state.step} for {max(now - state.phase_start, 0.0):.1f} s."
        )
        if age > max(MAX_MISSED_HEARTBEATS * beat, 2.0):
            parts.append(
                f"Its last heartbeat came {age:.1f} s ago: its process is stopped, or something in it keeps Python's "
                "lock."
            )
    if state.exit_kind == "killed" and case != "killed":
        parts.append(f"Of that its process died: {state.exit_reason}.")
    if case == "lost":
        parts.append(f"At its last heartbeat, {age:.1f} s ago, it was in {state.phase} of step {state.step}.")
    if state.stack and state.exit_kind != "killed" and case != "lost":
        now_or_then = "Its Python stack" if case == "absent" else "It is now at"
        parts.append(f"{now_or_then}, innermost first: {' < '.join(state.stack[:MAX_FRAMES])}.")
    elif state.stack:
        when = "Then" if case == "lost" else f"At its last heartbeat, {age:.1f} s ago,"
        parts.append(f"{when} it was at {' < '.join(state.stack[:MAX_FRAMES])}.")
    if case in ("absent", "lost"):
        parts.append(_format_last_operation(state))
    return " ".join(filter(None, parts))


def _format_last_operation(state: RankState) -> str:
    last = state.last_entry
    if last is None:
        return "It had started no operation before."
    status = {"e": "which ended", "w": "in which it waited", "f": "in which it waited", "s": "which it had started"}
    return f"Its last operation was {last.description} ({last.site}, step {last.step}), {status[last.flag]}."


def _format_memory(state: RankState) -> str:
    if not state.memory.limit_bytes:
        return ""
    text = f"Memory at its last heartbeat: {state.memory}"
    if "SIGKILL" in state.exit_reason and state.memory.used_share >= OOM_SHARE:
        return text + ", so it was probably killed for want of memory"
    return text + (", so probably not for want of memory" if "SIGKILL" in state.exit_reason else "")


def _format_waiting_ranks(verdict: Diagnosis, states: dict[int, RankState], now: float) -> str:
    if not verdict.waiting:
        return "No rank was waiting for it yet."
    shown = []
    for rank, entry in verdict.waiting[:MAX_RANKS]:
        until = entry.end_time if entry.flag == "f" else now
        shown.append(
            f"{format_rank(states[rank])} for {max(until - entry.wait_start, 0.0):.1f} s in {entry.description} at {entry.site}"
        )
    more = len(verdict.waiting) - MAX_RANKS
    return f"Waiting: {'; '.join(shown)}{f'; and {more} more' if more > 0 else ''}."


def _join_names(names: Sequence[str]) -> str:
    shown = [*names[:MAX_RANKS], *([f"{len(names) - MAX_RANKS} more"] if len(names) > MAX_RANKS else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}" if shown else "no rank"
