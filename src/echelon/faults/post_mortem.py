"""Post-mortem: the launcher diagnoses a failed run from the files of its ranks, when none of them is left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echelon.faults.diagnose import diagnose
from echelon.faults.failure_report import append_event, diagnosis_record, format_diagnosis
from echelon.faults.heartbeat import CULPRIT_KEY, DIAGNOSIS_KEY
from echelon.faults.state_store import FileStateStore
from echelon.faults.watchdog import RUN_KEY
from echelon.launch import scratch_dir
from echelon.launch.rank_failure import FailureExplanation, RankFailure, first_failure

MAX_DIAGNOSIS_AGE_S = 60.0
"""seconds for which a rank's diagnosis belongs to this failure: the rank wrote it just before torch's timeout"""


def explain_failure(folder: Path, failures: Sequence[RankFailure], world_size: int) -> FailureExplanation | None:
    """Explain a failed run in one paragraph; None where no rank had published its state."""
    if not (folder / scratch_dir.FAULTS_DIR).is_dir():
        return None
    store = FileStateStore(folder / scratch_dir.FAULTS_DIR)
    cause = first_failure(failures)
    report = store.get(DIAGNOSIS_KEY)
    if report and store.age(DIAGNOSIS_KEY) < MAX_DIAGNOSIS_AGE_S and (cause.lost_peer or cause.died):
        culprit = store.get(CULPRIT_KEY).partition(",")[0]
        return FailureExplanation(report, int(culprit) if culprit else None)
    states = store.states(world_size)
    for failure in failures:
        kind, ended = "killed" if failure.died else "raised", failure.time_ns / 1e9
        state = states[failure.rank].with_exit(kind, failure.reason, lost_peer=failure.lost_peer, exit_time=ended)
        states[failure.rank] = state
    diagnosis = diagnose(states)
    text = format_diagnosis(diagnosis, states)
    if run := store.get(RUN_KEY):
        append_event(Path(run), diagnosis_record(diagnosis, text))
    return FailureExplanation(text, diagnosis.culprits[0] if diagnosis.culprits else None)
