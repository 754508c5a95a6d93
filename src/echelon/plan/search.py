"""From a model and a cluster to plans, best first: every layout of the grammar that can be, priced and ranked.

[Note: nothing that could win is left out]

1. All layouts are listed. One is dropped only where its states alone, at their least, are more than the memory.
2. All that are left are priced at once by formula, and sorted.
3. In that order memory is asked, until enough fit; those are priced again by simulating their schedules, and sorted.

The same question has the same answer: nothing depends on chance or on time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from echelon.layout import Layout
from echelon.layout.layout import ASYNCHRONOUS
from echelon.plan.calibrate import calibrated
from echelon.plan.case import Case
from echelon.plan.cluster import Cluster
from echelon.plan.constants import FITTED, Constants
from echelon.plan.memory import worst
from echelon.plan.price import Plan, price
from echelon.plan.shape import ModelShape
from echelon.plan.time import times
from echelon.plan.work import stacked, work_of

OBJECTIVES = ("time", "cost", "energy", "devices")
"""seconds of a step; US dollars, joules of a step; the fewest devices, then seconds"""
FINALISTS = 24
"""that are simulated, at least"""
MOST_CHUNKS = 8
LARGEST_MICROBATCH = 16
FEWER = 0.7
"""share of the devices that a layout must use, where all of them cannot be divided"""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is asked."""

    shape: ModelShape
    cluster: Cluster
    batch: int
    """sequences of a step"""
    seq_len: int
    precision: str = "bf16"
    fixed: Mapping[str, int | str] = field(default_factory=dict)
    """keys of the layout that stay as they are given"""
    plan_only: bool = False
    """whether layouts count that cannot be run yet"""
    objective: str = "time"
    correction: float = 1.0
    """measured over predicted seconds of a run that was"""

    def case(self, layout: Layout) -> Case:
        return Case(
            shape=self.shape,
            cluster=self.cluster,
            layout=layout,
            seq_len=self.seq_len,
            precision=self.precision,
            correction=self.correction,
        )


def search(wish: Wish, *, top: int = 10, c: Constants = FITTED) -> list[Plan]:
    """The best plans that fit; none where nothing does. See [Note: nothing that could win is left out]."""
    cases = [wish.case(layout) for layout in layouts(wish) if _least_states(wish, layout) <= wish.cluster.memory]
    if not cases:
        return []
    c = calibrated(wish.cluster, c)
    seconds = times(stacked([work_of(case) for case in cases]), c).total
    order = np.argsort(rate(wish, cases, seconds), kind="stable")
    found: list[Plan] = []
    for place in order.tolist():
        if worst(cases[place], c).total <= wish.cluster.memory:
            found.append(price(cases[place], c))
            if len(found) == max(FINALISTS, 2 * top):
                break
    found.sort(key=lambda plan: (rank_of(wish, plan), str(plan.layout)))
    return found[:top]


def nearest(wish: Wish, c: Constants = FITTED) -> Plan | None:
    """Where nothing fits: the plan that needs the least memory."""
    cases = [wish.case(layout) for layout in layouts(wish)]
    if not cases:
        return None
    c = calibrated(wish.cluster, c)
    return price(min(cases, key=lambda case: (worst(case, c).total, str(case.layout))), c)


def rate(wish: Wish, cases: list[Case], seconds: np.ndarray) -> np.ndarray:
    """What the objective asks to be small."""
    worlds = np.array([case.layout.world for case in cases])
    if wish.objective == "devices":
        return np.asarray(worlds * 1e6 + seconds)
    device = wish.cluster.device
    each = {"time": 1.0, "cost": device.price / 3600, "energy": device.watts}[wish.objective]
    return np.asarray(seconds * each * (1.0 if wish.objective == "time" else worlds))


def rank_of(wish: Wish, plan: Plan) -> float:
    return float(rate(wish, [plan.case], np.array([plan.seconds]))[0])


# -- every layout -----------------------------------------------------------------------------------------------------


def layouts(wish: Wish) -> Iterator[Layout]:
    """Every layout that divides the model, the devices and the batch, with what is fixed."""
    fixed = dict(wish.fixed)
    for world in _worlds(wish):
        for tp, pp, cp in _degrees(wish, world):
            dp = world // (tp * pp * cp)
            if wish.batch % dp or not _agrees(fixed, dp=dp, tp=tp, pp=pp, cp=cp):
                continue
            for rest in _policies(wish, dp, tp, pp, cp):
                if all(rest.get(key, value) == value for key, value in fixed.items() if key not in DEGREES):
                    keys: dict[str, Any] = {**fixed, **rest, "dp": dp, "tp": tp, "pp": pp, "cp": cp}
                    layout = Layout(**keys)
                    if wish.plan_only or not layout.plan_only:
                        yield layout


DEGREES = ("dp", "tp", "pp", "cp")


def _agrees(fixed: Mapping[str, int | str], **degrees: int) -> bool:
    return all(fixed.get(name, value) == value for name, value in degrees.items())


def _worlds(wish: Wish) -> list[int]:
    """Numbers of devices to use: all, or fewer where some must be left over."""
    devices, per_node = wish.cluster.devices, wish.cluster.per_node
    if wish.objective in ("devices", "cost", "energy"):
        return [n for n in range(1, devices + 1) if n <= per_node or not n % per_node]
    fewest = max(1, int(FEWER * devices))
    step = 1 if devices <= 4 * per_node else per_node
    return [devices, *(n for n in range(devices - 1, fewest - 1, -1) if not n % step)]


def _degrees(wish: Wish, world: int) -> Iterator[tuple[int, int, int]]:
    shape, fixed = wish.shape, wish.fixed
    attention = next((layer.attention for layer, _ in shape.layers if layer.attention), None)
    widest = max(wish.cluster.per_node, int(fixed.get("tp", 1)))
    for tp in _divisors(world):
        if tp > widest or (attention is not None and not _splits(attention.heads, attention.kv_heads, tp)):
            continue
        for pp in _divisors(world // tp):
            if pp > shape.num_layers:
                continue
            for cp in _divisors(world // (tp * pp)):
                asked = wish.plan_only or "cp" in fixed
                if cp == 1 or (asked and wish.seq_len % (2 * cp) == 0):
                    yield tp, pp, cp


def _splits(heads: int, kv_heads: int, tp: int) -> bool:
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def _policies(wish: Wish, dp: int, tp: int, pp: int, cp: int) -> Iterator[dict[str, int | str]]:
    """The other keys."""
    per_rank = wish.batch // dp
    sizes = [int(wish.fixed["microbatch"])] if "microbatch" in wish.fixed else range(1, LARGEST_MICROBATCH + 1)
    recomputes = ("none", "full", "selective") if wish.plan_only else ("none", "full")
    for microbatch in sizes:
        if per_rank % microbatch:
            continue
        accumulate = per_rank // microbatch
        for schedule, zero, recompute, ep in product(
            _schedules(wish, pp), _zeros(wish, dp, tp, pp), recomputes, _experts(wish, dp, tp, cp)
        ):
            if schedule.get("schedule") in ASYNCHRONOUS and zero.get("zero", 1) > 1:
                continue
            yield {
                "microbatch": microbatch,
                "accumulate": accumulate,
                "recompute": recompute,
                **schedule,
                **zero,
                **ep,
            }


def _schedules(wish: Wish, pp: int) -> list[dict[str, int | str]]:
    if pp == 1:
        return [{}]
    layers, wanted = wish.shape.num_layers, wish.fixed.get("schedule", "")
    found: list[dict[str, int | str]] = [{"schedule": "1f1b"}, {"schedule": "zb-h1"}]
    found += [
        {"schedule": "interleaved", "vpp": chunks} for chunks in range(2, MOST_CHUNKS + 1) if not layers % (pp * chunks)
    ]
    if 2 * pp <= layers:
        found += [{"schedule": "zb-v"}, {"schedule": "dualpipe-v"}]
    if wanted and wanted not in {one["schedule"] for one in found}:
        found.append({"schedule": wanted})  # other schedules change the mathematics, or never win: only when asked
    return found


def _zeros(wish: Wish, dp: int, tp: int, pp: int) -> list[dict[str, int]]:
    if dp == 1:
        return [{"zero": 1 if pp > 1 else 0}]
    near = wish.cluster.per_node // tp
    inside = [{"zero": 3, "shard": near}] if 1 < near < dp and not dp % near else []
    return [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, *inside]


def _experts(wish: Wish, dp: int, tp: int, cp: int) -> list[dict[str, int]]:
    if not wish.shape.experts or not (wish.plan_only or "ep" in wish.fixed):
        return [{}]
    return [{"ep": ep} for ep in _divisors(dp * tp * cp) if not wish.shape.experts % ep]


def _least_states(wish: Wish, layout: Layout) -> float:
    """Bytes that no rank of the layout can do without: its share of parameters, gradients and states."""
    shape = wish.shape
    experts = sum(n * layer.expert_parameters for layer, n in shape.layers)
    layers = sum(n * layer.parameters for layer, n in shape.layers) - experts
    own = layers / (layout.tp * layout.pp) + experts / (layout.ep * layout.etp * layout.pp)
    data = layout.shards * layout.cp
    return own * {0: 18.0, 1: 6 + 12 / data, 2: 2 + 16 / data, 3: 16 / data}[layout.zero]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if not number % n]
