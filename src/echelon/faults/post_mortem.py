"""Who was to blame, asked by the launcher when no rank is left: from the files that they left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echelon.faults.diagnose import diagnose
from echelon.faults.event_log import write
from echelon.faults.failure_report import facts, paragraph
from echelon.faults.heartbeat import CULPRIT, DIAGNOSIS
from echelon.faults.state_store import Files
from echelon.faults.watchdog import RUN
from echelon.launch import scratch_dir
from echelon.launch.rank_failure import Explained, Failure, first

FRESH = 60.0
"""seconds for which a paragraph that a rank left is of this failure: it was said just before torch ended the wait"""


def explain(folder: Path, failures: Sequence[Failure], world: int) -> Explained | None:
    """One paragraph about a failed run; none where no rank got so far as to be watched."""
    if not (folder / scratch_dir.FAULTS).is_dir():
        return None
    board = Files(folder / scratch_dir.FAULTS)
    cause = first(failures)
    said = board.get(DIAGNOSIS)
    if said and board.age(DIAGNOSIS) < FRESH and (cause.lost_peer or cause.died):
        blamed = board.get(CULPRIT).partition(",")[0]
        return Explained(said, int(blamed) if blamed else None)
    states = board.states(world)
    for failure in failures:
        how = "killed" if failure.died else "raised"
        ended = states[failure.rank].after(how, failure.reason, lost_peer=failure.lost_peer)
        states[failure.rank] = ended.at(failure.when / 1e9)
    verdict = diagnose(states)
    text = paragraph(verdict, states)
    if run := board.get(RUN):
        write(Path(run), facts(verdict, text))
    return Explained(text, verdict.culprits[0] if verdict.culprits else None)
