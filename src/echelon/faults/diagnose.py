"""From every rank's state to who is to blame. Pure: states in, a verdict out.

[Note: who is to blame]

A fault on one rank stops many: those that wait for it, and those that wait for these.

1. A rank that raised, or whose process ended, and not because of another: the earliest.
2. Ranks that did different things as the same number of a lane. The one that does as n what others do as n + 1 left
   out what they do as n. Else they disagree.
3. Nobody ended, nobody disagrees: from every rank that waits go on to those that have not come to what it waits for,
   from them to whom they wait for, and so on. Who is reached and waits for nobody is to blame. Where there is none,
   they wait for each other in a circle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.faults.rank_state import RankState
from echelon.faults.recorder_entry import RecorderEntry


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    case: str
    """raised, killed, skipped, disagree, circle, absent or unknown"""
    culprits: tuple[int, ...]
    operation: RecorderEntry | None = None
    """what the others wait for"""
    culprit_operation: RecorderEntry | None = None
    """what the culprit did in its place"""
    waiting: tuple[tuple[int, RecorderEntry], ...] = ()
    """who waits for what, longest first"""


def diagnose(states: Sequence[RankState]) -> Diagnosis:
    by_rank = {state.rank: state for state in states}
    open_ones = {state.rank: entry for state in states if (entry := state.pending_entry) is not None}
    ended = [state for state in states if state.exit_kind and not state.lost_peer]
    cause = min(ended, key=lambda state: state.exit_time, default=None)
    # An error out of a collective, or an abort, may be how a disagreement ends.
    plain = cause is not None and cause.exit_kind == "raised" and cause.pending_entry is None
    if not plain and (found := _find_mismatch(states)) is not None:
        culprits, theirs, own, skipped = found
        case = "skipped" if skipped else "disagree"
        return _build_diagnosis(case, culprits, open_ones, theirs, own)
    if cause is not None:
        return _build_diagnosis(
            cause.exit_kind, (cause.rank,), open_ones, _awaited_operation(cause, open_ones, by_rank)
        )
    roots, circle = _find_roots(open_ones, by_rank)
    if roots:
        first = by_rank[roots[0]]
        return _build_diagnosis("absent", roots, open_ones, _awaited_operation(first, open_ones, by_rank))
    if circle:
        return _build_diagnosis("circle", circle, open_ones, open_ones[circle[0]], open_ones[circle[-1]])
    lost = [state.rank for state in states if not state.heartbeat_time and not state.entries]
    return _build_diagnosis(
        "absent" if lost else "unknown", tuple(lost), open_ones, next(iter(open_ones.values()), None)
    )


def _build_diagnosis(
    case: str,
    culprits: Sequence[int],
    open_ones: dict[int, RecorderEntry],
    operation: RecorderEntry | None,
    instead: RecorderEntry | None = None,
) -> Diagnosis:
    others = [(rank, entry) for rank, entry in open_ones.items() if rank not in culprits or case in _CULPRITS_WAIT_TOO]
    others.sort(key=lambda pair: (pair[1].wait_start, pair[0]))
    return Diagnosis(
        case=case, culprits=tuple(culprits), operation=operation, culprit_operation=instead, waiting=tuple(others)
    )


_CULPRITS_WAIT_TOO = ("disagree", "circle", "unknown")


def members_of(entry: RecorderEntry, states: dict[int, RankState]) -> tuple[int, ...]:
    """The ranks that an operation needs; of a large group they are not written in it."""
    if entry.peers:
        return entry.peers
    for state in states.values():
        if entry.sequence in state.sequences:
            return state.sequences[entry.sequence][1]
    return ()


def _find_roots(
    open_ones: dict[int, RecorderEntry], states: dict[int, RankState]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(who is waited for and waits for nobody, ranks that wait for each other in a circle).

    Thousands of ranks wait in one operation: who has not come to it is found once.
    """
    found: dict[tuple[str, int, tuple[int, ...]], list[int]] = {}
    edges: dict[int, list[int]] = {}
    for rank, entry in open_ones.items():
        key = (entry.sequence, entry.number, entry.peers)
        if key not in found:
            needed = [peer for peer in members_of(entry, states) if peer in states]
            found[key] = [peer for peer in needed if (states[peer].last_number(entry.sequence) or 0) < entry.number]
        edges[rank] = [peer for peer in found[key] if peer != rank]
    # Whoever a chain ends at is waited for directly by the last of the chain.
    roots = dict.fromkeys(peer for rank in sorted(edges) for peer in edges[rank] if peer not in open_ones)
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
    state: RankState, open_ones: dict[int, RecorderEntry], states: dict[int, RankState]
) -> RecorderEntry | None:
    """What others wait for this rank in: the longest wait that it has not come to, or any with it."""
    needing = [
        entry
        for rank, entry in sorted(open_ones.items(), key=lambda pair: pair[1].wait_start)
        if rank != state.rank and state.rank in members_of(entry, states)
    ]
    late = [entry for entry in needing if (state.last_number(entry.sequence) or 0) < entry.number]
    found = late or needing or [entry for rank, entry in open_ones.items() if rank != state.rank]
    return found[0] if found else None


# -- different operations under one number ----------------------------------------------------------------------------

_OperationKey = tuple[tuple[str, str, str], str]


def _operation_key(entry: RecorderEntry) -> _OperationKey:
    return entry.signature, entry.site


def _find_mismatch(states: Sequence[RankState]) -> tuple[tuple[int, ...], RecorderEntry, RecorderEntry, bool] | None:
    """(culprits, what the others did, what they did instead, whether they left it out), where ranks differ."""
    sequences: dict[str, dict[int, dict[int, RecorderEntry]]] = {}
    for state in states:
        for entry in state.entries:
            if not entry.is_p2p:
                sequences.setdefault(entry.sequence, {}).setdefault(state.rank, {})[entry.number] = entry
    found = [
        split for ranks in sequences.values() if len(ranks) > 1 and (split := _mismatch_in_sequence(ranks)) is not None
    ]
    # The earliest: what follows it on other sequences is its consequence.
    return min(found, key=lambda split: split[1].start_time, default=None)


def _mismatch_in_sequence(
    ranks: dict[int, dict[int, RecorderEntry]],
) -> tuple[tuple[int, ...], RecorderEntry, RecorderEntry, bool] | None:
    numbers = Counter(number for done in ranks.values() for number in done)
    shared = sorted(number for number, count in numbers.items() if count > 1)
    signatures = {n: {done[n].signature for done in ranks.values() if n in done} for n in shared}
    if all(len(kinds) == 1 for kinds in signatures.values()):
        return None  # lines alone may differ: ranks may take different ways to the same operation
    for number in shared:
        keys = {rank: _operation_key(done[number]) for rank, done in ranks.items() if number in done}
        if len(set(keys.values())) == 1:
            continue
        usual, _ = Counter(keys.values()).most_common(1)[0]
        some = {key: rank for rank, key in sorted(keys.items(), reverse=True)}  # one of each kind
        for rank in sorted(some.values(), key=lambda rank: (keys[rank] == usual, rank)):
            for other in some.values():
                if keys[other] != keys[rank] and _is_one_ahead(ranks[rank], ranks[other], number):
                    culprits = tuple(r for r in keys if keys[r] == keys[rank])
                    return culprits, ranks[other][number], ranks[rank][number], True
        odd = tuple(rank for rank in keys if keys[rank] != usual)
        tied = 2 * len(odd) >= len(keys)
        model = next(rank for rank in keys if keys[rank] == usual)
        return tuple(keys) if tied else odd, ranks[model][number], ranks[odd[0]][number], False
    return None


def _is_one_ahead(one: dict[int, RecorderEntry], other: dict[int, RecorderEntry], number: int) -> bool:
    """Whether one did from `number` on what the other does, or is about to do, one number later."""
    pairs = [(one[n], other[n + 1]) for n in sorted(one) if n >= number and n + 1 in other]
    if pairs:
        return all(_operation_key(a) == _operation_key(b) for a, b in pairs)
    # The other hangs in `number` and has no next one. Steps repeat: look what followed it before.
    stuck, went = _operation_key(other[number]), _operation_key(one[number])
    before = [
        _operation_key(other[n + 1])
        for n in sorted(other)
        if n + 1 in other and n < number and _operation_key(other[n]) == stuck
    ]
    return bool(before) and before[-1] == went
