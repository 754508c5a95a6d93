"""A verdict in one paragraph, with all that a person needs to find the line."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from echelon.faults.diagnose import Verdict
from echelon.faults.host_memory import NEAR
from echelon.faults.rank_state import State
from echelon.faults.recorder_entry import Entry

MOST = 8
"""ranks that are told one by one"""
FRAMES = 6
STALE = 3.0
"""heartbeats that may be missed before that is worth a word"""


def paragraph(verdict: Verdict, states: Sequence[State], *, beat: float = 1.0, now: float | None = None) -> str:
    now = time.time() if now is None else now
    by_rank = {state.rank: state for state in states}
    culprits = [by_rank[rank] for rank in verdict.culprits if rank in by_rank]
    parts = [_head(verdict, culprits, by_rank)]
    if verdict.case in ("absent", "skipped", "killed") and culprits:
        broke = verdict.operation is not None and verdict.operation.flag == "f"
        case = "lost" if verdict.case == "absent" and broke else verdict.case
        parts += [_where(culprits[0], case, beat, now)]
    parts += [_waiting(verdict, by_rank, now)]
    return " ".join(part for part in parts if part)


def facts(verdict: Verdict, text: str) -> dict[str, Any]:
    """For the run's log."""
    operation = verdict.operation
    return {
        "case": verdict.case,
        "ranks": list(verdict.culprits),
        "collective": operation.op if operation else None,
        "number": operation.number if operation else None,
        "axis": operation.axis if operation else None,
        "site": operation.site if operation else None,
        "step": operation.step if operation else None,
        "waiting": [rank for rank, _ in verdict.waiting],
        "text": text,
    }


def who(state: State) -> str:
    place = state.position or "its mesh position is not known yet"
    return f"rank {state.rank} ({place})"


def _head(verdict: Verdict, culprits: Sequence[State], states: dict[int, State]) -> str:
    operation, instead = verdict.operation, verdict.instead
    names = _several([who(state) for state in culprits])
    first = culprits[0] if culprits else None
    if verdict.case in ("raised", "killed") and first is not None:
        how = "raised" if verdict.case == "raised" else "ended without an exception:"
        at = f"in {first.phase} of step {first.step}" if first.step else f"in {first.phase}, before the first step"
        memory = f"{_memory(first)}." if verdict.case == "killed" else ""
        last = _last(first)
        return " ".join(filter(None, [f"{names} {how} {first.ending.splitlines()[0]}, {at}.", memory, last]))
    if verdict.case == "absent" and operation is not None:
        if operation.op == "receive":
            return f"{names} did not send what another rank waits for: {_told(operation)}."
        verb = "did not come" if len(culprits) == 1 else "did not come, neither of them," if len(culprits) == 2 else ""
        broke = ", and the connection to it broke" if operation.flag == "f" else ""
        return f"{names} {verb or 'did not come, none of them,'} to {_told(operation)}{broke}."
    if verdict.case == "skipped" and operation is not None and instead is not None:
        return (
            f"{names} left out {_told(operation)}, or one like it before: as number {operation.number} it went on to "
            f"{instead.op} ({_shape(instead)}, {instead.site}), which the others do one later."
        )
    if verdict.case == "disagree" and operation is not None and instead is not None:
        others = [s for s in states.values() if s.rank not in verdict.culprits]
        against = f"{_several([who(state) for state in others[:MOST]])} did" if others else "it is"
        return (
            f"{names} disagree{'s' if len(culprits) == 1 else ''} about number {operation.number} on axis "
            f"{operation.axis} in step {operation.step}: {against} {operation.op} ({_shape(operation)}, "
            f"{operation.site}), and {instead.op} ({_shape(instead)}, {instead.site}) elsewhere."
        )
    if verdict.case == "circle":
        return f"{names} wait for each other in different operations: each is in one that another has not come to."
    named = f" ({_told(operation)})" if operation is not None else ""
    return f"all ranks came to what they wait for{named}, and it did not end: look at the network between them."


def _told(entry: Entry) -> str:
    return f"{entry.what} ({_shape(entry)}, asked for at {entry.site} in {entry.phase} of step {entry.step})"


def _shape(entry: Entry) -> str:
    return f"{entry.dtype} {entry.shape}" if entry.dtype else "no tensor"


def _where(state: State, case: str, beat: float, now: float) -> str:
    parts = []
    age = now - state.when
    if not state.when:
        return "It never gave a sign of life."
    if case == "absent":
        parts.append(f"It has been in {state.phase} of step {state.step} for {max(now - state.since, 0.0):.1f} s.")
        if age > max(STALE * beat, 2.0):
            parts.append(
                f"Its last heartbeat came {age:.1f} s ago: its process is stopped, or something in it keeps Python's "
                "lock."
            )
    if state.how == "killed" and case != "killed":
        parts.append(f"Of that its process died: {state.ending}.")
    if case == "lost":
        parts.append(f"At its last heartbeat, {age:.1f} s ago, it was in {state.phase} of step {state.step}.")
    if state.stack and state.how != "killed" and case != "lost":
        now_or_then = "Its Python stack" if case == "absent" else "It is now at"
        parts.append(f"{now_or_then}, innermost first: {' < '.join(state.stack[:FRAMES])}.")
    elif state.stack:
        when = "Then" if case == "lost" else f"At its last heartbeat, {age:.1f} s ago,"
        parts.append(f"{when} it was at {' < '.join(state.stack[:FRAMES])}.")
    if case in ("absent", "lost"):
        parts.append(_last(state))
    return " ".join(filter(None, parts))


def _last(state: State) -> str:
    last = state.last
    if last is None:
        return "It had started no operation before."
    status = {"e": "which ended", "w": "in which it waited", "f": "in which it waited", "s": "which it had started"}
    return f"Its last operation was {last.what} ({last.site}, step {last.step}), {status[last.flag]}."


def _memory(state: State) -> str:
    if not state.memory.limit:
        return ""
    text = f"Memory at its last heartbeat: {state.memory}"
    if "SIGKILL" in state.ending and state.memory.share >= NEAR:
        return text + ", so it was probably killed for want of memory"
    return text + (", so probably not for want of memory" if "SIGKILL" in state.ending else "")


def _waiting(verdict: Verdict, states: dict[int, State], now: float) -> str:
    if not verdict.waiting:
        return "No rank was waiting for it yet."
    shown = []
    for rank, entry in verdict.waiting[:MOST]:
        until = entry.ended if entry.flag == "f" else now
        shown.append(f"{who(states[rank])} for {max(until - entry.waiting, 0.0):.1f} s in {entry.what} at {entry.site}")
    more = len(verdict.waiting) - MOST
    return f"Waiting: {'; '.join(shown)}{f'; and {more} more' if more > 0 else ''}."


def _several(names: Sequence[str]) -> str:
    shown = [*names[:MOST], *([f"{len(names) - MOST} more"] if len(names) > MOST else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}" if shown else "no rank"
