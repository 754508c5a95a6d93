"""Who was to blame, asked by the launcher when no rank is left: from the files that they left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echelon.faults.diagnose import diagnose
from echelon.faults.event_log import append_event
from echelon.faults.failure_report import diagnosis_record, format_diagnosis
from echelon.faults.heartbeat import CULPRIT_KEY, DIAGNOSIS_KEY
from echelon.faults.state_store import FileStateStore
from echelon.faults.watchdog import RUN_KEY
from echelon.launch import scratch_dir
from echelon.launch.rank_failure import FailureExplanation, RankFailure, first_failure

MAX_DIAGNOSIS_AGE_S = 60.0
"""seconds for which a paragraph that a rank left is of this failure: it was said just before torch ended the wait"""


def explain_failure(folder: Path, failures: Sequence[RankFailure], world: int) -> FailureExplanation | None:
    """One paragraph about a failed run; none where no rank got so far as to be watched."""
    if not (folder / scratch_dir.FAULTS_DIR).is_dir():
        return None
    board = FileStateStore(folder / scratch_dir.FAULTS_DIR)
    cause = first_failure(failures)
    said = board.get(DIAGNOSIS_KEY)
    if said and board.age(DIAGNOSIS_KEY) < MAX_DIAGNOSIS_AGE_S and (cause.lost_peer or cause.died):
        blamed = board.get(CULPRIT_KEY).partition(",")[0]
        return FailureExplanation(said, int(blamed) if blamed else None)
    states = board.states(world)
    for failure in failures:
        how = "killed" if failure.died else "raised"
        ended = states[failure.rank].with_exit(how, failure.reason, lost_peer=failure.lost_peer)
        states[failure.rank] = ended.with_exit_time(failure.time_ns / 1e9)
    verdict = diagnose(states)
    text = format_diagnosis(verdict, states)
    if run := board.get(RUN_KEY):
        append_event(Path(run), diagnosis_record(verdict, text))
    return FailureExplanation(text, verdict.culprits[0] if verdict.culprits else None)
