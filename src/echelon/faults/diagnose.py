"""Diagnosis of a failed or hanging run: a pure function of every rank's state.

[Note: how the culprit is found]

A fault on one rank stops the ranks that wait for it, and the ranks that wait for those.

1. If ranks raised or were killed, and not because of another rank, the earliest is the culprit.
2. If ranks ran different operations under one number of a sequence, they mismatch. A rank whose operation n is the
   others' operation n + 1 has skipped their operation n.
3. Otherwise follow the waits: from each waiting rank to the ranks that have not reached its operation, and on from
   those. A rank that is reached and does not wait is the culprit. If every rank reached waits, they form a cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.faults.rank_state import RankState
from echelon.faults.recorder_entry import RecorderEntry


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The ranks that caused a failure, the operation they are missing in, and the ranks that wait."""

    case: str
    """raised, killed, skipped, disagree, circle, absent or unknown"""
    culprits: tuple[int, ...]
    operation: RecorderEntry | None = None
    """the operation that the other ranks wait for"""
    culprit_operation: RecorderEntry | None = None
    """the operation that the culprit ran in its place"""
    waiting: tuple[tuple[int, RecorderEntry], ...] = ()
    """the waiting ranks and their operations, longest wait first"""


def diagnose(states: Sequence[RankState]) -> Diagnosis:
    """Find the culprit of a failure or hang; see [Note: how the culprit is found]."""
    by_rank = {state.rank: state for state in states}
    pending = {state.rank: entry for state in states if (entry := state.pending_entry) is not None}

    def conclude(
        case: str, culprits: Sequence[int], operation: RecorderEntry | None, actual: RecorderEntry | None = None
    ) -> Diagnosis:
        waiting = [pair for pair in pending.items() if pair[0] not in culprits or case in _CULPRITS_WAIT_TOO]
        waiting.sort(key=lambda pair: (pair[1].wait_start, pair[0]))
        return Diagnosis(
            case=case,
            culprits=tuple(culprits),
            operation=operation,
            culprit_operation=actual,
            waiting=tuple(waiting),
        )

    ended = [state for state in states if state.exit_kind and not state.lost_peer]
    cause = min(ended, key=lambda state: state.exit_time, default=None)
    # A mismatch may end in an abort, or in an error that a collective raises.
    raised_outside = cause is not None and cause.exit_kind == "raised" and cause.pending_entry is None
    if not raised_outside and (mismatch := _find_mismatch(states)) is not None:
        culprits, expected, actual, skipped = mismatch
        return conclude("skipped" if skipped else "disagree", culprits, expected, actual)
    if cause is not None:
        return conclude(cause.exit_kind, (cause.rank,), _awaited_operation(cause, pending, by_rank))
    roots, cycle = _find_roots(pending, by_rank)
    if roots:
        return conclude("absent", roots, _awaited_operation(by_rank[roots[0]], pending, by_rank))
    if cycle:
        return conclude("circle", cycle, pending[cycle[0]], pending[cycle[-1]])
    lost = [state.rank for state in states if not state.heartbeat_time and not state.entries]
    return conclude("absent" if lost else "unknown", lost, next(iter(pending.values()), None))


_CULPRITS_WAIT_TOO = ("disagree", "circle", "unknown")


def members_of(entry: RecorderEntry, states: dict[int, RankState]) -> tuple[int, ...]:
    """The ranks of an operation; the entry of a large group does not list them."""
    if entry.peers:
        return entry.peers
    for state in states.values():
        if entry.sequence in state.sequences:
            return state.sequences[entry.sequence][1]
    return ()


def _find_roots(
    pending: dict[int, RecorderEntry], states: dict[int, RankState]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ranks that others wait for and that do not wait, ranks that wait for each other in a cycle).

    Thousands of ranks may wait in one operation: the ranks that are missing in it are found once.
    """
    missing: dict[tuple[str, int, tuple[int, ...]], list[int]] = {}
    edges: dict[int, list[int]] = {}
    for rank, entry in pending.items():
        key = (entry.sequence, entry.number, entry.peers)
        if key not in missing:
            members = [peer for peer in members_of(entry, states) if peer in states]
            missing[key] = [peer for peer in members if (states[peer].last_number(entry.sequence) or 0) < entry.number]
        edges[rank] = [peer for peer in missing[key] if peer != rank]
    # The last waiting rank of every chain waits for the root directly.
    roots = dict.fromkeys(peer for rank in sorted(edges) for peer in edges[rank] if peer not in pending)
    return tuple(roots), () if roots else _find_cycle(edges)


def _find_cycle(edges: dict[int, list[int]]) -> tuple[int, ...]:
    for start in sorted(edges):
        path, now = [], start
        while edges.get(now) and now not in path:
            path.append(now)
            now = edges[now][0]
        if now in path:
            return tuple(sorted(path[path.index(now) :]))
    return ()


def _awaited_operation(
    state: RankState, pending: dict[int, RecorderEntry], states: dict[int, RankState]
) -> RecorderEntry | None:
    """The operation in which others wait for this rank: the longest wait that it has not reached, or any with it."""
    others = [entry for rank, entry in pending.items() if rank != state.rank]
    shared = [entry for entry in others if state.rank in members_of(entry, states)]
    shared.sort(key=lambda entry: entry.wait_start)
    not_reached = [entry for entry in shared if (state.last_number(entry.sequence) or 0) < entry.number]
    return next(iter(not_reached or shared or others), None)


# -- mismatches: different operations under one number ----------------------------------------------------------------

_Mismatch = tuple[tuple[int, ...], RecorderEntry, RecorderEntry, bool]
"""(culprits, the others' operation, the culprits' operation, whether they skipped the former)"""


def _find_mismatch(states: Sequence[RankState]) -> _Mismatch | None:
    sequences: dict[str, dict[int, dict[int, RecorderEntry]]] = {}
    for state in states:
        for entry in state.entries:
            if not entry.is_p2p:
                sequences.setdefault(entry.sequence, {}).setdefault(state.rank, {})[entry.number] = entry
    mismatches = [_mismatch_in_sequence(ranks) for ranks in sequences.values()]
    # The earliest one: later mismatches on other sequences are its consequences.
    return min(filter(None, mismatches), key=lambda mismatch: mismatch[1].start_time, default=None)


def _mismatch_in_sequence(ranks: dict[int, dict[int, RecorderEntry]]) -> _Mismatch | None:
    numbers = Counter(number for done in ranks.values() for number in done)
    shared = sorted(number for number, count in numbers.items() if count > 1)
    signatures = {n: {done[n].signature for done in ranks.values() if n in done} for n in shared}
    if all(len(distinct) == 1 for distinct in signatures.values()):
        return None  # call sites alone may differ: ranks may reach an operation by different branches
    for number in shared:
        keys = {rank: done[number].key for rank, done in ranks.items() if number in done}
        if len(set(keys.values())) == 1:
            continue
        usual, _ = Counter(keys.values()).most_common(1)[0]
        one_each = {key: rank for rank, key in sorted(keys.items(), reverse=True)}  # one rank per operation
        for rank in sorted(one_each.values(), key=lambda rank: (keys[rank] == usual, rank)):
            for other in one_each.values():
                if keys[other] != keys[rank] and _is_one_ahead(ranks[rank], ranks[other], number):
                    culprits = tuple(r for r in keys if keys[r] == keys[rank])
                    return culprits, ranks[other][number], ranks[rank][number], True
        odd = tuple(rank for rank in keys if keys[rank] != usual)
        tied = 2 * len(odd) >= len(keys)
        model = next(rank for rank in keys if keys[rank] == usual)
        return tuple(keys) if tied else odd, ranks[model][number], ranks[odd[0]][number], False
    return None


def _is_one_ahead(one: dict[int, RecorderEntry], other: dict[int, RecorderEntry], number: int) -> bool:
    """Whether `one` ran from `number` on what `other` runs, or is about to run, one number later."""
    pairs = [(one[n], other[n + 1]) for n in sorted(one) if n >= number and n + 1 in other]
    if pairs:
        return all(ran.key == runs_next.key for ran, runs_next in pairs)
    # The other rank hangs in `number` and has no next entry. Steps repeat: look at what followed it in earlier steps.
    hanging = other[number].key
    earlier = [n for n in sorted(other) if n < number and n + 1 in other and other[n].key == hanging]
    return bool(earlier) and other[earlier[-1] + 1].key == one[number].key
