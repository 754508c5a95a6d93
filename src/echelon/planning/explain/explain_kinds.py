"""Why a plan has its cp_kind or tp_kind: what each kind sends over which links, what overlaps it, and which kinds the
model's heads rule out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from echelon.draw.number_format import format_bytes, format_time
from echelon.layout import Layout
from echelon.planning.calibrate.calibration import constants_for
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.cluster.device_kinds import GIB
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.cp_time import cp_time
from echelon.planning.cost.cp_traffic import cp_bytes_per_token
from echelon.planning.cost.reached_rates import reached_rates
from echelon.planning.cost.step_time import FLASH_BACKWARD_RATIO, microbatch_time
from echelon.planning.priced_plan import Plan, price
from echelon.planning.scenario import PlanRequest, Scenario
from echelon.planning.search.layout_families import MIN_GRID_TP, cp_kinds, tp_kinds

CP_KINDS = ("ring", "gather", "ulysses", "ring-ulysses")
TP_KINDS = ("1d", "2d", "2.5d", "3d")
EQUAL_WITHIN = 0.005
"""relative step times that count as equal"""


def kind_reasons(request: PlanRequest, plan: Plan, c: Constants = FITTED_CONSTANTS) -> Iterator[str]:
    layout = plan.layout
    shape = plan.scenario.shape
    if layout.cp > 1 and shape.num_gathered_modules:
        yield (
            f"cp={layout.cp} leaves {shape.num_gathered_modules} modules of {shape.num_gathered_layers} layers whole: "
            "every rank computes them for full sequences, which are gathered."
        )
    if layout.cp > 1:
        yield f"cp={layout.cp} as {_cp_name(layout)} sends {_cp_traffic(plan.scenario, c)}."
        legal = cp_kinds(_without_fixed(request, "cp_kind", "ulysses"), layout.tp, layout.cp)
        for kind in CP_KINDS:
            layouts = [replace(layout, cp_kind=name, ulysses=inner) for name, inner in legal if name == kind]
            if layouts and kind != layout.cp_kind:
                other = _best_plan(plan, layouts, c)
                yield f"As {_cp_name(other.layout)} it {_verdict(plan, other)}: {_cp_traffic(other.scenario, c)}."
            elif not layouts and kind != layout.cp_kind:
                yield f"{kind} cannot be: {_broken_rule(request, layout, kind)}."
    if layout.tp_kind != "1d" or layout.tp >= MIN_GRID_TP:
        yield f"tp={layout.tp} as {_tp_name(layout)} sends {_tp_traffic(plan.scenario)}."
        legal = tp_kinds(_without_fixed(request, "tp_kind", "depth"), layout.tp)
        for kind in TP_KINDS:
            layouts = [_with_tp_kind(layout, kind, depth) for name, depth in legal if name == kind != layout.tp_kind]
            if layouts:
                other = _best_plan(plan, layouts, c)
                yield f"As {_tp_name(other.layout)} it {_verdict(plan, other)}: {_tp_traffic(other.scenario)}."


def _best_plan(plan: Plan, layouts: Sequence[Layout], c: Constants) -> Plan:
    """The best plan of the same scenario in one of these layouts."""
    plans = (price(replace(plan.scenario, layout=layout), c) for layout in layouts)
    return min(plans, key=lambda other: (not other.fits, other.seconds))


def _cp_name(layout: Layout) -> str:
    return f"ring-ulysses of {layout.ulysses}" if layout.cp_kind == "ring-ulysses" else layout.cp_kind


def _cp_traffic(scenario: Scenario, c: Constants) -> str:
    """Bytes per token, their links, and what overlaps them."""
    layout, per_node = scenario.layout, scenario.cluster.per_node
    sent = f"{format_bytes(cp_bytes_per_token(scenario))} a token and layer"
    where = "inside a node" if layout.tp * layout.cp <= per_node else "between nodes"
    if layout.cp_kind in ("gather", "ulysses"):
        return f"{sent} {where}, exposed"
    c, work = constants_for(scenario, c), count_work(scenario)
    attention, rates = microbatch_time(work, c).attention, reached_rates(work.microbatch.device, c)
    times = cp_time(work.microbatch, rates, attention, FLASH_BACKWARD_RATIO * attention)
    hop, block = (float(seconds) / scenario.shape.num_layers for seconds in (times.hop, times.block))
    hidden = "attention overlaps it" if hop < block else "attention overlaps a part of it"
    overlap = f"{hidden}: a hop takes {format_time(hop)}, the attention block {format_time(block)}"
    if layout.cp_kind == "ring":
        return f"{sent} {where}, and {overlap}"
    inner = "inside a node" if layout.tp * layout.ulysses <= per_node else "between nodes"
    return f"{sent}, heads {inner}, exposed, keys and values {where}, and {overlap}"


def _broken_rule(request: PlanRequest, layout: Layout, kind: str) -> str:
    """The rule that a kind breaks."""
    if kind == "ring-ulysses":
        return f"no part of cp={layout.cp} that fits a node beside tp={layout.tp} divides the heads of a rank"
    broken = request.violations(replace(layout, cp_kind=kind, ulysses=layout.cp if kind == "ulysses" else 1))
    return next((f"cp={layout.cp} {rule.message}" for rule in broken.values()), f"cp={layout.cp}")


def _with_tp_kind(layout: Layout, kind: str, depth: int) -> Layout:
    given = {key: value for key, value in layout.explicit.items() if key not in ("sp", "tp_kind", "depth")}
    return Layout.resolve({**given, "tp_kind": kind, "depth": depth})


def _tp_name(layout: Layout) -> str:
    if layout.tp_kind == "1d":
        return "1d with sequence parallelism" if layout.sp else "1d"
    return f"2.5d of depth {layout.depth}" if layout.depth > 1 else layout.tp_kind


def _tp_traffic(scenario: Scenario) -> str:
    tp, layers = count_work(scenario).microbatch.tp, scenario.shape.num_layers
    every = scenario.layout.microbatch * scenario.seq_len / scenario.layout.cp * layers
    where = "inside a node" if scenario.layout.tp <= scenario.cluster.per_node else "between nodes"
    padded = scenario.tokens * scenario.layout.cp / (scenario.layout.microbatch * scenario.seq_len)
    more = f", and {padded - 1:.0%} of its sequences are padding" if padded > 1 else ""
    size, count = float(tp.wire_bytes) / every, tp.num_collectives / layers
    return f"{format_bytes(size)} a token and layer in {count:.0f} collectives {where}{more}"


def _without_fixed(request: PlanRequest, *keys: str) -> PlanRequest:
    """The request without these fixed keys, to compare with the other kinds."""
    return replace(request, fixed={key: value for key, value in request.fixed.items() if key not in keys})


def _verdict(plan: Plan, other: Plan) -> str:
    if not other.fits:
        return f"would need {(other.memory.total - other.scenario.cluster.memory) / GIB:.1f} GiB more than a device has"
    change = other.seconds / plan.seconds - 1
    if abs(change) < EQUAL_WITHIN:
        return "would be as fast"
    return f"would be {abs(change):.0%} {'slower' if change > 0 else 'faster'}"
