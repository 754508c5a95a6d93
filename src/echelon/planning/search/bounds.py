"""What no layout of a branch can do without: seconds and bytes. The search need not look where these are too much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echelon.layout import Layout
from echelon.planning.calibrate.constants import Constants
from echelon.planning.cost.optimizer_update import lets_go
from echelon.planning.cost.param_group_traffic import MOMENTS, gradient_bytes
from echelon.planning.cost.recompute_cost import SEGMENTS, doing, kept_of
from echelon.planning.cost.step_time import microbatch, repeated, waiting
from echelon.planning.cost.work import stacked, work_of
from echelon.planning.scenario import Case
from echelon.planning.search.layout_families import MOST_CHUNKS, Branch, Family, Wish, branches


@dataclass(frozen=True, order=True)
class Bound:
    rated: float
    """what the objective cannot be less than"""
    branch: Branch
    activations: float
    """bytes that some rank holds at least"""


def bounds(wish: Wish, c: Constants) -> list[Bound]:
    """Of every branch whose states and activations can fit, best first."""
    found = branches(wish)
    cases = {family: wish.case(_longest(wish, family)) for family in found}
    all_layers = {family: _activations(wish, case) for family, case in cases.items()}
    every = [
        (number, branch, all_layers[family] * min(1.0, branch.accumulate / branch.pp))
        for number, (family, some) in enumerate(found.items())
        for branch in some
    ]
    # States are divided by all devices at most, and gradients need not be there when all activations are.
    each = 0 if "offload" in wish.fixed else wish.master_bytes + MOMENTS * wish.moment_bytes
    states = each * wish.shape.parameters
    every = [one for one in every if states / one[1].world + one[2] <= wish.cluster.memory]
    if not every:
        return []
    at = np.array([number for number, _, _ in every])
    pp, accumulate = (np.array([getattr(branch, key) for _, branch, _ in every]) for key in ("pp", "accumulate"))
    works = stacked([work_of(case, once_a_step=False) for case in cases.values()])
    m = microbatch(works, c)
    sent = m.tp + m.ep + m.cp
    layers = m.forward + m.backward + repeated(works, m) + sent
    forward = m.forward + sent / (2 + works.repeated)
    bubble = 0.0
    if "schedule" not in wish.fixed:
        bubble = np.min(
            waiting(pp, accumulate, MOST_CHUNKS, *((part[at] / pp) for part in (forward, layers, m.weights))), axis=0
        )
    seconds = accumulate * (layers + 3 * m.head)[at] / pp + bubble
    rated = rate(wish, [branch.world for _, branch, _ in every], seconds)
    return sorted(Bound(r, branch, size) for r, (_, branch, size) in zip(rated.tolist(), every, strict=True))


def _longest(wish: Wish, family: Family) -> Layout:
    """With as many microbatches as a step can have: what is moved once a step is then least in a microbatch."""
    return family.layout(accumulate=wish.batch // family.microbatch)


def _activations(wish: Wish, case: Case) -> float:
    """Bytes of all layers of a microbatch, which some rank of a pipeline holds at its fullest.

    The first of pp stages has pp microbatches in flight, each in 1 / pp of the layers, unless a step has too few
    microbatches to fill it; schedules there and back have as much on their last rank.
    """
    kind, schedule = case.layout.recompute.partition(":")[0], wish.fixed.get("schedule", "")
    # How many layers a budget repeats, or a segment has, depends on the pipeline.
    if kind == "budget" or kind in SEGMENTS[1:] or schedule in ("naive", "terapipe"):
        return 0.0
    if "activations" in str(wish.fixed.get("offload", "")):
        return 0.0
    done = doing(case)
    return sum(n * kept_of(case, layer, done) for layer, n in case.shape.layers)


def least_bytes(wish: Wish, layout: Layout, activations: float) -> float:
    """That no rank of the layout can do without: its share of parameters, gradients and states, and activations."""
    shape, case = wish.shape, wish.case(layout)
    if layout.offload != "none":
        return 0.0 if "activations" in layout.offload else activations
    experts = sum(n * layer.expert_parameters for layer, n in shape.layers)
    layers = sum(n * layer.parameters for layer, n in shape.layers) - experts
    own = layers / (layout.tp * layout.pp)
    spread = experts / (layout.ep * layout.etp * layout.pp)
    data = layout.dp * layout.cp
    compute, gradient = case.element_bytes, gradient_bytes(case)
    beside = max(case.master_bytes - compute, 0) + MOMENTS * case.moment_bytes
    # Under zero 1 to 3: what is whole on a rank, and what is divided. Gradients are divided under 2 and 3.
    whole, divided = {0: (compute + beside, 0), 3: (0, compute + beside)}.get(layout.zero, (compute, beside))
    parts = ((own, data), (spread, max(1, data * layout.tp // (layout.ep * layout.etp))))
    states = sum(count * (whole + divided / ranks) for count, ranks in parts)
    of_gradients = sum(count * gradient / (ranks if layout.zero >= 2 else 1) for count, ranks in parts)
    if layout.accumulate * layout.pp == 1:  # all activations are there before all gradients are
        return states + max(activations, 0.0 if lets_go(case) else of_gradients)
    return states + activations + of_gradients


def rate(wish: Wish, worlds: Sequence[int], seconds: np.ndarray) -> np.ndarray:
    """What the objective asks to be small, of layouts on so many devices."""
    devices = np.array(worlds)
    if wish.objective == "devices":
        return np.asarray(devices * 1e6 + seconds)
    if wish.objective == "time":
        return np.asarray(seconds)
    device = wish.cluster.device
    return np.asarray(seconds * devices * (device.price / 3600 if wish.objective == "cost" else device.watts))
