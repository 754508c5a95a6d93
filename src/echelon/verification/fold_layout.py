"""Fold a layout to fewer ranks: what a small machine can run of a large layout, and what it leaves out.

[Note: what a folded layout keeps]

A bug of a strategy, or of two strategies together, shows on two ranks per mesh axis as on sixteen. So every axis that
has several ranks keeps several, where there is room, and so does everything else that runs code of its own: shards and
their replicas, expert replicas, nodes of experts, both kinds of ranks of ring-ulysses, stages between the first and
the last. Where there are too few ranks for that, dp is folded first and tp last. A degree becomes
a divisor of itself, or 2 or 3 where nothing must be divisible by it: a custom model cannot follow its layout.

Microbatches beyond the steady state of a pipeline and sequences of a microbatch are folded as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from echelon.layout import Layout
from echelon.layout.rules import LayoutConstraints, find_violations
from echelon.layout.validation_error import ValidationError
from echelon.pipeline.schedules import FILE_PREFIX

DEFAULT_MAX_RANKS = 8
"""two ranks for each of three mesh axes, and as many as the default layouts need. A rank is a process that takes some
hundred megabytes, and ranks share the cores of this machine"""
DEGREES = ("tp", "cp", "ep", "pp", "dp", "shard", "etp", "ep_inner", "ulysses")
"""in the order of preference: the fold keeps as many tp ranks as it can, then cp ranks, …"""
MAX_MICROBATCHES, MAX_SEQUENCES = 8, 4
"""microbatches of a step, and sequences of a microbatch, that are not folded"""


@dataclass(frozen=True, kw_only=True)
class FoldedLayout:
    """A layout, and the one that runs in its place."""

    requested: Layout
    layout: Layout
    """as it runs"""

    @property
    def changes(self) -> str:
        """What was folded, in words; empty if nothing was."""
        before, after = self.requested.explicit, self.layout.explicit
        changed = [key for key in (before | after) if before.get(key) != after.get(key)]
        pairs = ((key, getattr(self.requested, key), getattr(self.layout, key)) for key in changed)
        return ", ".join(f"{key}={old} to {new}" for key, old, new in pairs if old != new)


def fold_layout(layout: Layout, max_ranks: int = DEFAULT_MAX_RANKS, *, model_follows: bool = True) -> FoldedLayout:
    """Fold a layout to at most `max_ranks` ranks. See [Note: what a folded layout keeps].

    `model_follows`: the model is reduced for the folded layout.

    >>> fold_layout(Layout.parse("dp=4,tp=8,pp=2,accumulate=64"), 8).changes
    'dp=4 to 2, tp=8 to 2, accumulate=64 to 4'
    """
    if layout.world <= max_ranks:
        return FoldedLayout(requested=layout, layout=_fold_batch(layout, layout))
    candidates = [
        candidate
        for candidate in _smaller_layouts(layout, max_ranks, model_follows)
        if not find_violations(candidate, LayoutConstraints())
    ]
    if not candidates:
        rule = f"are too few for the layout ({layout}), whose schedule is a file for {layout.pp} pipeline ranks"
        raise ValidationError.single("max-ranks", str(max_ranks), rule, legal=f">= {layout.pp}")
    wanted = _strategies(layout)

    def preference(candidate: Layout) -> tuple[tuple[bool, ...], tuple[int, ...]]:
        kept = tuple(has or not had for had, has in zip(wanted, _strategies(candidate), strict=True))
        return kept, tuple(getattr(candidate, key) for key in DEGREES)

    best = max(candidates, key=preference)
    return FoldedLayout(requested=layout, layout=_fold_batch(layout, best))


def _strategies(layout: Layout) -> tuple[bool, ...]:
    """What runs code of its own, the most important first."""
    expert_ranks = layout.ep * layout.etp
    return (
        layout.tp > 1,
        layout.cp > 1,
        layout.pp > 1,
        layout.ep > 1,
        layout.dp > 1,
        layout.num_shards * layout.cp > 1 and layout.zero > 0,
        layout.etp > 1,
        1 < layout.num_shards < layout.dp,
        layout.ulysses > 1,
        layout.ulysses < layout.cp,
        layout.ep_inner > 1,
        layout.depth > 1,
        expert_ranks > 1 and layout.dp * layout.cp * layout.tp > expert_ranks,
        layout.pp * layout.vpp > 2,
    )


def _smaller_layouts(layout: Layout, max_ranks: int, model_follows: bool) -> Iterator[Layout]:
    """Layouts of at most `max_ranks` ranks with smaller degrees; some violate a rule."""
    from_file = layout.schedule.startswith(FILE_PREFIX)
    degrees = (
        _smaller(layout.tp, max_ranks, model_follows),
        _smaller(layout.cp, max_ranks, model_follows or layout.cp_kind in ("ring", "gather")),
        [layout.pp] if from_file else _smaller(layout.pp, max_ranks, True),
        _smaller(layout.dp, max_ranks, True),
    )
    for tp, cp, pp, dp in product(*degrees):
        if dp * tp * cp * pp > max_ranks:
            continue
        keys: dict[str, int | str] = {"dp": dp, "tp": tp, "cp": cp, "pp": pp, "zero": layout.zero}
        if tp == 1:
            keys |= {"sp": 0, "tp_kind": "1d"}
        if cp == 1:
            keys |= {"cp_kind": "ring"}
        if pp == 1:
            keys |= {"schedule": "1f1b", "vpp": 1}
        choices = product(
            _smaller(layout.depth, tp, model_follows),
            [cp] if layout.cp_kind == "ulysses" else _smaller(layout.ulysses, cp, model_follows),
            _smaller(layout.shard, dp, True) if layout.shard < layout.dp else [dp],
            _expert_degrees(layout, dp * cp * tp, model_follows),
        )
        for depth, ulysses, shard, experts in choices:
            yield layout.replace(**keys, depth=depth, ulysses=ulysses, shard=shard, **experts)


def _expert_degrees(layout: Layout, ranks: int, free: bool) -> list[dict[str, int]]:
    degrees = product(*(_smaller(degree, ranks, free) for degree in (layout.ep, layout.etp, layout.ep_inner)))
    return [
        {"ep": ep, "etp": etp, "ep_inner": inner}
        for ep, etp, inner in degrees
        if ranks % (ep * etp) == 0 and (inner == 1 or (inner % etp == 0 and inner < ep * etp))
    ]


def _fold_batch(layout: Layout, folded: Layout) -> Layout:
    """Fold microbatches and sequences. A file fixes the microbatches; two per stage reach the steady state."""
    accumulate, pp = layout.accumulate, folded.pp
    if layout.schedule.startswith(FILE_PREFIX):
        pass
    elif accumulate > MAX_MICROBATCHES:
        accumulate = pp * max(2, -(-4 // pp)) + bool(accumulate % layout.pp)
    elif pp < layout.pp and accumulate < layout.pp:
        accumulate = min(accumulate, max(pp - 1, 2))
    microbatch = layout.microbatch if layout.microbatch <= MAX_SEQUENCES else 2
    return folded.replace(accumulate=accumulate, microbatch=microbatch)


def _smaller(degree: int, most: int, free: bool) -> list[int]:
    return [n for n in range(1, min(degree, most) + 1) if degree % n == 0 or (free and n in (2, 3))]
