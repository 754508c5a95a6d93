"""Why a plan is the best: what limits it, why neighbouring layouts are worse, what an upgrade would gain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from echelon.layout import Layout, ValidationError
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.cluster.device_kinds import GIB
from echelon.planning.explain import explain_kinds
from echelon.planning.priced_plan import Plan, price, with_layout_keys
from echelon.planning.scenario import PlanRequest, Scenario
from echelon.planning.search.layout_families import can_split_sequence
from echelon.planning.search.layout_search import search_plans

CAUSES = {
    "tp": "exposed tensor-parallel communication",
    "ep": "exposed token dispatch to experts",
    "cp": "context-parallel communication",
    "pp": "p2p transfers between stages",
    "bubble": "the pipeline bubble",
    "imbalance": "waiting for the slowest stage",
    "dp": "exposed data-parallel communication of gradients and parameters",
    "recompute": "recomputed activations",
    "launches": "kernel launches",
    "passing": "memory-bound operators",
    "update": "the optimizer's update",
    "offload": "offload: the update on the host and transfers to it",
    "head": "the output layer, for which the other stages wait",
}
"""causes of step time beside GEMMs and attention"""
CP_CAUSES = {
    "ring": "the ring exchange of keys and values, and merging of blocks",
    "gather": "all-gather of keys and values, and reduce-scatter of their gradients",
    "ulysses": "the all-to-all of heads and tokens",
    "ring-ulysses": "the all-to-all of heads and tokens, and merging of the ring's blocks",
}
"""the same by cp_kind"""
WORTH_NAMING = 0.03
"""share of a step from which a cause is named"""
MEMORY_BOUND = 0.85
"""share of memory from which a plan is memory-bound"""


def explain_plan(request: PlanRequest, plans: Sequence[Plan], c: Constants = FITTED_CONSTANTS) -> Plan:
    """The best plan with its reasons."""
    best = plans[0]
    parts = (explain_kinds.kind_reasons, _neighbours, _upgrades)
    return replace(best, reasons=(*_limits(best), *(reason for part in parts for reason in part(request, best, c))))


def _cause(name: str, layout: Layout) -> str:
    return CP_CAUSES[layout.cp_kind] if name == "cp" and layout.cp > 1 else CAUSES[name]


def _limits(plan: Plan) -> Iterator[str]:
    """What limits the step time."""
    layout, share = plan.layout, {name: seconds / plan.seconds for name, seconds in plan.times.items()}
    if layout.world == 1:
        yield "One device holds the model: no parallelism is needed."
    idle = plan.scenario.cluster.devices - layout.world
    if idle:
        yield f"{idle} of {plan.scenario.cluster.devices} devices stay idle: no split of all of them is faster."
    useful = sum(share.get(name, 0.0) for name in ("products", "attention", "head"))
    yield f"GEMMs and attention take {useful:.0%} of a step."
    waste = [name for name in CAUSES if name != "head" or layout.pp > 1]
    costly = sorted((name for name in waste if share.get(name, 0.0) >= WORTH_NAMING), key=lambda name: -share[name])
    for name in costly[:3]:
        yield f"{share[name]:.0%} of a step goes to {_cause(name, layout)}."
    used = plan.memory.total / plan.scenario.cluster.memory
    if used >= MEMORY_BOUND:
        largest = sorted(plan.memory.parts.items(), key=lambda item: -item[1])[:2]
        terms = " and ".join(f"{name} ({size / GIB:.1f} GiB)" for name, size in largest)
        yield f"Memory binds: {used:.0%} of the fullest device is used, most of it by {terms}."


def _neighbours(request: PlanRequest, plan: Plan, c: Constants) -> Iterator[str]:
    """What each neighbouring layout would cost."""
    for name, scenario in _neighbour_scenarios(request, plan.scenario):
        other = price(scenario, c)
        if not other.fits:
            over = other.memory.total / GIB - other.scenario.cluster.memory / GIB
            yield f"{name} would need {over:.1f} GiB more than a device has."
        elif abs(other.seconds / plan.seconds - 1) < explain_kinds.EQUAL_WITHIN:
            yield f"{name} would be as fast."
        elif other.seconds > plan.seconds:
            added = {key: other.times.get(key, 0.0) - plan.times.get(key, 0.0) for key in {**plan.times, **other.times}}
            most = max(added, key=lambda key: added[key])
            more = f"more {_cause(most, other.layout) if most in CAUSES else most}"
            why = "its GEMMs are less efficient" if most == "products" else more
            yield f"{name} would be {other.seconds / plan.seconds - 1:.0%} slower: {why}."


def _neighbour_scenarios(request: PlanRequest, scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    layout = scenario.layout
    tp, pp, cp, dp = layout.tp, layout.pp, layout.cp, layout.dp
    halves_dp: list[dict[str, int | str]] = [{"tp": 2 * tp, "dp": dp // 2}, {"pp": 2 * pp, "dp": dp // 2}]
    trials = halves_dp if dp % 2 == 0 else []
    trials += [{"tp": tp // 2, "dp": 2 * dp}] if tp % 2 == 0 else []
    trials += [{"pp": pp // 2, "dp": 2 * dp}] if pp % 2 == 0 else []
    trials += [{"cp": 2 * cp, "dp": dp // 2}] if dp % 2 == 0 and can_split_sequence(request, 2 * cp) else []
    trials += [{"cp": cp // 2, "dp": 2 * dp}] if cp % 2 == 0 else []
    if scenario.shape.experts:
        trials += [{"ep": ep} for ep in (layout.ep // 2, 2 * layout.ep) if ep and not scenario.shape.experts % ep]
    if dp * cp > 1:
        trials += [{"zero": zero} for zero in (layout.zero - 1, layout.zero + 1) if 0 <= zero <= 3]
    policies = ("none", "ops", "full") if scenario.has_counted_layers else ("none", "full")
    trials += [{"recompute": kind} for kind in policies if kind != layout.recompute]
    for keys in trials:
        other = _neighbour(layout, keys)
        if other is not None and request.allows(other) and not request.violations(other):
            changed = ",".join(f"{key}={value}" for key, value in keys.items() if key != "dp")
            yield changed, replace(scenario, layout=other)


def _neighbour(layout: Layout, keys: dict[str, int | str]) -> Layout | None:
    """The layout with other keys and the same batch; none if it does not divide the batch."""
    given = {**layout.explicit, **keys}
    if given.get("cp_kind") == "ring-ulysses" and given["cp"] == given["ulysses"]:
        given["cp_kind"] = "ulysses"
    without_cp, without_pp = given.get("cp", 1) == 1, given.get("pp", 1) == 1
    dropped = ("shard", *(("cp_kind", "ulysses") if without_cp else ()), *(("schedule", "vpp") if without_pp else ()))
    given = {key: value for key, value in given.items() if key not in dropped}
    per_rank, rest = divmod(layout.batch, int(given["dp"]))
    if rest or per_rank % layout.microbatch:
        return None
    try:
        return Layout.resolve({**given, "accumulate": per_rank // layout.microbatch})
    except ValidationError:
        return None


def _upgrades(request: PlanRequest, plan: Plan, c: Constants) -> Iterator[str]:
    """What one change of the cluster or of the model would gain."""
    cluster = request.cluster
    # The same microbatch: a quick search is accurate enough.
    like: dict[str, int | str] = {"microbatch": plan.layout.microbatch} if plan.layout.pp > 1 else {}
    request = replace(request, fixed={**like, **request.fixed})
    larger = cluster.with_devices(lambda device: replace(device, memory=int(1.5 * device.memory)))
    faster = replace(cluster, inter_node=replace(cluster.inter_node, bandwidth=2 * cluster.inter_node.bandwidth))
    trials = [
        ("1.5x the memory on every device", replace(request, cluster=larger)),
        ("links of twice the speed between nodes", replace(request, cluster=faster)),
    ]
    if request.seq_len % 2 == 0:
        trials.append(
            ("half the sequence length", replace(request, seq_len=request.seq_len // 2, batch=2 * request.batch))
        )
    if plan.scenario.expert_load > 1:
        even = price(replace(plan.scenario, imbalance=1.0), c).seconds
        assumed = f"imbalance {plan.scenario.imbalance:g} is assumed"
        yield f"With balanced experts it would be {plan.seconds / even - 1:.0%} faster: {assumed}."
    for name, other in trials:
        if cluster.devices <= cluster.per_node and "links" in name:
            continue
        for best in search_plans(other, top=1, c=c):
            if best.seconds < 0.98 * plan.seconds:
                gain = plan.seconds / best.seconds - 1
                yield f"With {name} the best layout would be {gain:.0%} faster: {best.layout}."


def training_cost(plan: Plan, tokens: float) -> str:
    """Days, dollars and energy to train on a number of tokens."""
    days = tokens / plan.tokens_per_s / 86400
    device, devices = plan.scenario.cluster.device, plan.layout.world
    dollars, megawatt_hours = days * 24 * devices * device.price, days * 24 * devices * device.watts / 1e6
    cost = f"about {dollars:,.0f} US dollars and {megawatt_hours:,.3g} MWh"
    return f"{tokens:.3g} tokens take {days:.3g} days on {devices} devices: {cost}."


def explain_infeasible(plan: Plan, c: Constants = FITTED_CONSTANTS) -> list[str]:
    """Why nothing fits, from the plan that needs the least memory, and changes that would fit."""
    parts = sorted(plan.memory.parts.items(), key=lambda item: -item[1])
    terms = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in parts[:3])
    have = plan.scenario.cluster.memory / GIB
    return [
        f"Nothing fits. The least that a device would need is {plan.memory.total / GIB:.1f} GiB, and it has {have:.0f} "
        f"GiB ({plan.layout}).",
        f"The largest terms: {terms}.",
        *_remedies(plan, c),
    ]


def _remedies(plan: Plan, c: Constants) -> Iterator[str]:
    """Changes that would fit."""
    scenario, cluster = plan.scenario, plan.scenario.cluster
    seq_len = scenario.seq_len
    while seq_len > 256:
        seq_len //= 2
        if price(replace(scenario, seq_len=seq_len), c).fits:
            yield f"Sequences of {seq_len:,} would fit."
            break
    if plan.layout.offload == "none":
        other = price(with_layout_keys(scenario, offload="optimizer"), c)
        if other.fits:
            yield f"With optimizer states on the host it would fit, at {other.seconds:.3g} s a step: {other.layout}."
    for more in (2, 4, 8, 16, 32):
        groups = tuple(replace(group, nodes=more * group.nodes) for group in cluster.node_groups)
        grown = with_layout_keys(scenario, dp=more * plan.layout.dp, zero=3)
        if price(replace(grown, cluster=replace(cluster, node_groups=groups)), c).fits:
            yield f"{more * cluster.devices} devices would do, with {grown.layout}."
            return
