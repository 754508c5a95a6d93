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

from echelon.faults.rank_state import State
from echelon.faults.recorder_entry import Entry


@dataclass(frozen=True, kw_only=True)
class Verdict:
    case: str
    """raised, killed, skipped, disagree, circle, absent or unknown"""
    culprits: tuple[int, ...]
    operation: Entry | None = None
    """what the others wait for"""
    instead: Entry | None = None
    """what the culprit did in its place"""
    waiting: tuple[tuple[int, Entry], ...] = ()
    """who waits for what, longest first"""


def diagnose(states: Sequence[State]) -> Verdict:
    by_rank = {state.rank: state for state in states}
    open_ones = {state.rank: entry for state in states if (entry := state.waiting) is not None}
    ended = [state for state in states if state.how and not state.lost_peer]
    cause = min(ended, key=lambda state: state.ended, default=None)
    # An error out of a collective, or an abort, may be how a disagreement ends.
    plain = cause is not None and cause.how == "raised" and cause.waiting is None
    if not plain and (found := _different(states)) is not None:
        culprits, theirs, own, skipped = found
        case = "skipped" if skipped else "disagree"
        return _verdict(case, culprits, open_ones, theirs, own)
    if cause is not None:
        return _verdict(cause.how, (cause.rank,), open_ones, _awaited(cause, open_ones, by_rank))
    roots, circle = _roots(open_ones, by_rank)
    if roots:
        first = by_rank[roots[0]]
        return _verdict("absent", roots, open_ones, _awaited(first, open_ones, by_rank))
    if circle:
        return _verdict("circle", circle, open_ones, open_ones[circle[0]], open_ones[circle[-1]])
    lost = [state.rank for state in states if not state.when and not state.entries]
    return _verdict("absent" if lost else "unknown", tuple(lost), open_ones, next(iter(open_ones.values()), None))


def _verdict(
    case: str,
    culprits: Sequence[int],
    open_ones: dict[int, Entry],
    operation: Entry | None,
    instead: Entry | None = None,
) -> Verdict:
    others = [(rank, entry) for rank, entry in open_ones.items() if rank not in culprits or case in _BOTH_WAIT]
    others.sort(key=lambda pair: (pair[1].waiting, pair[0]))
    return Verdict(case=case, culprits=tuple(culprits), operation=operation, instead=instead, waiting=tuple(others))


_BOTH_WAIT = ("disagree", "circle", "unknown")


def members(entry: Entry, states: dict[int, State]) -> tuple[int, ...]:
    """The ranks that an operation needs; of a large group they are not written in it."""
    if entry.peers:
        return entry.peers
    for state in states.values():
        if entry.lane in state.lanes:
            return state.lanes[entry.lane][1]
    return ()


def _roots(open_ones: dict[int, Entry], states: dict[int, State]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(who is waited for and waits for nobody, ranks that wait for each other in a circle).

    Thousands of ranks wait in one operation: who has not come to it is found once.
    """
    found: dict[tuple[str, int, tuple[int, ...]], list[int]] = {}
    edges: dict[int, list[int]] = {}
    for rank, entry in open_ones.items():
        key = (entry.lane, entry.number, entry.peers)
        if key not in found:
            needed = [peer for peer in members(entry, states) if peer in states]
            found[key] = [peer for peer in needed if (states[peer].number(entry.lane) or 0) < entry.number]
        edges[rank] = [peer for peer in found[key] if peer != rank]
    # Whoever a chain ends at is waited for directly by the last of the chain.
    roots = dict.fromkeys(peer for rank in sorted(edges) for peer in edges[rank] if peer not in open_ones)
    return tuple(roots), () if roots else _circle(edges)


def _circle(edges: dict[int, list[int]]) -> tuple[int, ...]:
    for start in sorted(edges):
        path, now = [], start
        while edges.get(now) and now not in path:
            path.append(now)
            now = edges[now][0]
        if now in path:
            return tuple(sorted(path[path.index(now) :]))
    return ()


def _awaited(state: State, open_ones: dict[int, Entry], states: dict[int, State]) -> Entry | None:
    """What others wait for this rank in: the longest wait that it has not come to, or any with it."""
    needing = [
        entry
        for rank, entry in sorted(open_ones.items(), key=lambda pair: pair[1].waiting)
        if rank != state.rank and state.rank in members(entry, states)
    ]
    late = [entry for entry in needing if (state.number(entry.lane) or 0) < entry.number]
    found = late or needing or [entry for rank, entry in open_ones.items() if rank != state.rank]
    return found[0] if found else None


# -- different operations under one number ----------------------------------------------------------------------------

_Key = tuple[tuple[str, str, str], str]


def _key(entry: Entry) -> _Key:
    return entry.signature, entry.site


def _different(states: Sequence[State]) -> tuple[tuple[int, ...], Entry, Entry, bool] | None:
    """(culprits, what the others did, what they did instead, whether they left it out), where ranks differ."""
    lanes: dict[str, dict[int, dict[int, Entry]]] = {}
    for state in states:
        for entry in state.entries:
            if not entry.point_to_point:
                lanes.setdefault(entry.lane, {}).setdefault(state.rank, {})[entry.number] = entry
    found = [split for ranks in lanes.values() if len(ranks) > 1 and (split := _split(ranks)) is not None]
    # The earliest: what follows it on other lanes is its consequence.
    return min(found, key=lambda split: split[1].started, default=None)


def _split(ranks: dict[int, dict[int, Entry]]) -> tuple[tuple[int, ...], Entry, Entry, bool] | None:
    numbers = Counter(number for done in ranks.values() for number in done)
    shared = sorted(number for number, count in numbers.items() if count > 1)
    signatures = {n: {done[n].signature for done in ranks.values() if n in done} for n in shared}
    if all(len(kinds) == 1 for kinds in signatures.values()):
        return None  # lines alone may differ: ranks may take different ways to the same operation
    for number in shared:
        keys = {rank: _key(done[number]) for rank, done in ranks.items() if number in done}
        if len(set(keys.values())) == 1:
            continue
        usual, _ = Counter(keys.values()).most_common(1)[0]
        some = {key: rank for rank, key in sorted(keys.items(), reverse=True)}  # one of each kind
        for rank in sorted(some.values(), key=lambda rank: (keys[rank] == usual, rank)):
            for other in some.values():
                if keys[other] != keys[rank] and _ahead(ranks[rank], ranks[other], number):
                    culprits = tuple(r for r in keys if keys[r] == keys[rank])
                    return culprits, ranks[other][number], ranks[rank][number], True
        odd = tuple(rank for rank in keys if keys[rank] != usual)
        tied = 2 * len(odd) >= len(keys)
        model = next(rank for rank in keys if keys[rank] == usual)
        return tuple(keys) if tied else odd, ranks[model][number], ranks[odd[0]][number], False
    return None


def _ahead(one: dict[int, Entry], other: dict[int, Entry], number: int) -> bool:
    """Whether one did from `number` on what the other does, or is about to do, one number later."""
    pairs = [(one[n], other[n + 1]) for n in sorted(one) if n >= number and n + 1 in other]
    if pairs:
        return all(_key(a) == _key(b) for a, b in pairs)
    # The other hangs in `number` and has no next one. Steps repeat: look what followed it before.
    stuck, went = _key(other[number]), _key(one[number])
    before = [_key(other[n + 1]) for n in sorted(other) if n + 1 in other and n < number and _key(other[n]) == stuck]
    return bool(before) and before[-1] == went
