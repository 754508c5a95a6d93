"""Why a plan has this kind of context parallelism, or of tensor parallelism: what each kind sends, over which links,
what hides it, and which of them the model's heads do not allow. In words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from echelon.layout import Layout
from echelon.layout.rules import Facts, broken
from echelon.planning.calibrate.calibration import constants_of
from echelon.planning.calibrate.constants import FITTED, Constants
from echelon.planning.cluster.device_kinds import GIB
from echelon.planning.cost.cp_time import reaching
from echelon.planning.cost.cp_traffic import bytes_sent
from echelon.planning.cost.step_time import FLASH_BACKWARD, microbatch
from echelon.planning.cost.work import work_of
from echelon.planning.model.model_shape import RuleFacts
from echelon.planning.priced_plan import Plan, price
from echelon.planning.scenario import Case
from echelon.planning.search.layout_families import LEAST_GRID, Wish, context_kinds, tensor_kinds

CONTEXT = ("ring", "gather", "ulysses", "ring-ulysses")
TENSOR = ("1d", "2d", "2.5d", "3d")
SAME = 0.005
"""share of a step by which plans may differ and be called equal"""


def reasons(wish: Wish, plan: Plan, c: Constants = FITTED) -> Iterator[str]:
    if plan.layout.cp > 1:
        yield from _of_context(wish, plan, c)
    if plan.layout.tp_kind != "1d" or plan.layout.tp >= LEAST_GRID:
        yield from _of_tensor(wish, plan, c)


# -- context ----------------------------------------------------------------------------------------------------------


def _of_context(wish: Wish, plan: Plan, c: Constants) -> Iterator[str]:
    layout = plan.layout
    yield f"cp={layout.cp} as {_context_name(layout)} sends {_context_bytes(plan.case, c)}."
    legal = context_kinds(_free(wish, "cp_kind", "ulysses"), layout.tp, layout.cp)
    for kind in CONTEXT:
        cases = [
            replace(plan.case, layout=replace(layout, cp_kind=kind, ulysses=inner))
            for name, inner in legal
            if name == kind != layout.cp_kind
        ]
        if cases:
            other = min((price(case, c) for case in cases), key=lambda found: (not found.fits, found.seconds))
            yield f"As {_context_name(other.layout)} it {_verdict(plan, other)}: {_context_bytes(other.case, c)}."
        elif kind != layout.cp_kind and kind not in dict(legal):
            yield f"{kind} cannot be: {_why_not(wish, layout, kind)}."


def _context_name(layout: Layout) -> str:
    return f"ring-ulysses of {layout.ulysses}" if layout.cp_kind == "ring-ulysses" else layout.cp_kind


def _context_bytes(case: Case, c: Constants) -> str:
    """What is sent, over which links, and what hides it."""
    layout, per_node = case.layout, case.cluster.per_node
    sent = f"{_size(bytes_sent(case))} a token and layer"
    near = layout.tp * layout.cp <= per_node
    where = "inside a node" if near else "between nodes"
    if layout.cp_kind in ("gather", "ulysses"):
        return f"{sent} {where}, and nothing hides it"
    c, work = constants_of(case, c), work_of(case)
    attention = microbatch(work, c).attention
    found = reaching(work, c, attention, FLASH_BACKWARD * attention)
    hop, block = (float(x) / case.shape.num_layers for x in (found.hop, found.block))
    hidden = "attention hides it" if hop < block else "attention hides a part of it"
    beside = f"{hidden}: a hop takes {_short(hop)}, the block beside it {_short(block)}"
    if layout.cp_kind == "ring":
        return f"{sent} {where}, and {beside}"
    inner = "inside a node" if layout.tp * layout.ulysses <= per_node else "between nodes"
    return f"{sent}, heads {inner}, which nothing hides, keys and values {where}, and {beside}"


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 0.99e-3 else f"{seconds * 1e6:.0f} us"


def _why_not(wish: Wish, layout: Layout, kind: str) -> str:
    """The rule that a kind breaks; of inner degrees, that none divides the heads."""
    if kind == "ring-ulysses":
        return f"no part of cp={layout.cp} that fits a node beside tp={layout.tp} divides the heads of a rank"
    facts = Facts(seq_len=wish.seq_len, model=RuleFacts(wish.shape))
    found = broken(replace(layout, cp_kind=kind, ulysses=layout.cp if kind == "ulysses" else 1), facts)
    return next((f"cp={layout.cp} {rule.rule}" for rule in found.values()), f"cp={layout.cp}")


# -- tensor -----------------------------------------------------------------------------------------------------------


def _of_tensor(wish: Wish, plan: Plan, c: Constants) -> Iterator[str]:
    layout = plan.layout
    yield f"tp={layout.tp} as {_tensor_name(layout)} sends {_tensor_bytes(plan.case)}."
    legal = tensor_kinds(_free(wish, "tp_kind", "depth"), layout.tp)
    for kind in TENSOR:
        layouts = [_of_kind(layout, kind, depth) for name, depth in legal if name == kind != layout.tp_kind]
        if layouts:
            plans = (price(replace(plan.case, layout=one), c) for one in layouts)
            other = min(plans, key=lambda found: (not found.fits, found.seconds))
            yield f"As {_tensor_name(other.layout)} it {_verdict(plan, other)}: {_tensor_bytes(other.case)}."


def _of_kind(layout: Layout, kind: str, depth: int) -> Layout:
    given = {key: value for key, value in layout.explicit.items() if key not in ("sp", "tp_kind", "depth")}
    return Layout.resolve({**given, "tp_kind": kind, "depth": depth})


def _tensor_name(layout: Layout) -> str:
    if layout.tp_kind == "1d":
        return "1d with sequence parallelism" if layout.sp else "1d"
    return f"2.5d of depth {layout.depth}" if layout.depth > 1 else layout.tp_kind


def _tensor_bytes(case: Case) -> str:
    work, layers = work_of(case), case.shape.num_layers
    every = case.layout.microbatch * case.seq_len / case.layout.cp * layers
    where = "inside a node" if case.layout.tp <= case.cluster.per_node else "between nodes"
    messages = work.tp_messages / layers
    padded = case.tokens * case.layout.cp / (case.layout.microbatch * case.seq_len)
    more = f", and {padded - 1:.0%} of its sequences are padding" if padded > 1 else ""
    return f"{_size(work.tp_bytes / every)} a token and layer in {messages:.0f} messages {where}{more}"


# -- both -------------------------------------------------------------------------------------------------------------


def _free(wish: Wish, *keys: str) -> Wish:
    """Without what was asked for: that is to be compared with the others."""
    return replace(wish, fixed={key: value for key, value in wish.fixed.items() if key not in keys})


def _size(count: float) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 1000 * 2**10 else f"{count / 2**10:.3g} KiB"


def _verdict(plan: Plan, other: Plan) -> str:
    if not other.fits:
        return f"would need {(other.memory.total - other.case.cluster.memory) / GIB:.1f} GiB more than a device has"
    change = other.seconds / plan.seconds - 1
    if abs(change) < SAME:
        return "would be as fast"
    return f"would be {abs(change):.0%} {'slower' if change > 0 else 'faster'}"
