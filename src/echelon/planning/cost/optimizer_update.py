"""What an optimizer holds, moves and sends on a rank: its own cost functions (optim/cost.py), asked of a shape.

A shape knows matrices and vectors. What belongs to single elements is divided as parameters are; numbers of rows and
columns are on every rank that may hold a part of their matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from echelon.optim import cost
from echelon.optim.optimizer_groups import is_muons
from echelon.optim.update_rule import Rule
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.planning.cluster.link_time import on_the_wire
from echelon.planning.cost.param_group_traffic import (
    EXPERTS,
    data_ranks,
    fullest_share,
    gradient_bytes,
    policy_of,
    units_of,
    update_bytes,
)
from echelon.planning.model.model_shape import Layer
from echelon.planning.scenario import Case

STEPS = 5
"""of Newton and Schulz (optim/rules/muon.py)"""


@dataclass(frozen=True)
class Matrix:
    """Parameters of one shape, on the rank."""

    name: str
    shape: tuple[int, ...]
    count: float
    """of them"""
    cut: int = 1
    """ranks of tp or of experts that divide each"""
    shards: int = 1
    """data-parallel ranks that divide what is left"""

    @property
    def size(self) -> int:
        found = 1
        for side in self.shape:
            found *= side
        return found


def state_bytes(case: Case, rule: Rule, stage: int) -> int:
    """Of a rank, between steps."""
    total = 0.0
    for one in matrices(case, stage):
        whole = cost.state_bytes(rule, one.shape, name=one.name)
        sides = _sides(rule, one)
        total += one.count * ((whole - sides) / (one.cut * one.shards) + sides * _held(one))
    return round(total)


def _sides(rule: Rule, one: Matrix) -> float:
    """Bytes of numbers of rows and columns."""
    if rule.name not in ("adafactor", "sm3") or len(one.shape) < 2:
        return 0.0
    stack = one.size // (one.shape[-1] * one.shape[-2])
    return 4.0 * stack * (one.shape[-1] + one.shape[-2])


def _held(one: Matrix) -> float:
    """Share of the matrices of a stack of which a rank may hold something: experts elsewhere are left out."""
    return 1 / one.cut if len(one.shape) > 2 else 1.0


def matrices(case: Case, stage: int) -> Iterator[Matrix]:
    """The parameters of a rank, by shape."""
    layout, shape = case.layout, case.shape
    shards, width = policy_of(case).shards, shape.width
    ranks = tp_grid_cost.weight_ranks(layout)
    for layer, n in shape.layers:
        yield from _of_layer(case, layer, n * fullest_share(case), shards, ranks)
    if stage == 0:
        yield Matrix("embed.weight", (shape.vocab, width), 1, ranks, shards)
        if shape.position_parameters:
            yield Matrix("positions.weight", (shape.position_parameters // width, width), 1, ranks, shards)
    if stage == layout.pp - 1:
        yield Matrix("norm", (width,), shape.other_parameters / width, ranks, shards)
        if not (shape.tied and layout.pp == 1):
            yield Matrix("head.weight", (shape.vocab, width), 1, ranks, shards)


def _of_layer(case: Case, layer: Layer, count: float, shards: int, ranks: int) -> Iterator[Matrix]:
    layout = case.layout
    for product in layer.products:
        parts = product.parts or (product.outputs,)
        if product.experts:
            among = data_ranks(case, EXPERTS) if layout.zero else 1
            shape = (product.experts, *((len(parts),) if len(parts) > 1 else ()), parts[0], product.inputs)
            yield Matrix("experts.weight", shape, count, layout.ep * layout.etp, among)
            continue
        for outputs in parts:
            yield Matrix("weight", (outputs, product.inputs), count, ranks if product.split else 1, shards)
    if layer.other_parameters:
        yield Matrix("norm", (case.shape.width,), count * layer.other_parameters / case.shape.width, 1, shards)


# -- gradients that are let go ----------------------------------------------------------------------------------------


def lets_go(case: Case) -> bool:
    """Each unit is updated in backward, and its gradients are let go: in a step of one microbatch."""
    rule, layout = case.rule, case.layout
    return rule is not None and rule.in_backward and layout.accumulate * layout.pp == 1


def living_gradients(case: Case) -> int:
    """Bytes of gradients that are there at once: of two layers, and of what lies around them."""
    size = case.reduce_bytes if policy_of(case).sums_gradients else case.element_bytes
    found = [(unit.shards * unit.shard_numel, unit.name) for unit, _ in units_of(case, 0)]
    layers = sorted((numel for numel, name in found if name != "ends"), reverse=True)
    ends = sum(numel for numel, name in found if name == "ends")
    return size * (2 * layers[0] + ends)


# -- time -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sending:
    """What an update does beside moving bytes through memory, once a step."""

    bytes: float = 0.0
    """on the wire"""
    messages: int = 0
    flops: float = 0.0


def moved_bytes(case: Case) -> float:
    """Of an element; 0: as programs do."""
    if case.rule is None:
        return update_bytes(case)
    found = cost.moved_bytes(case.rule, gradient_bytes=gradient_bytes(case))
    return found if case.has_kernels or case.rule.name not in ("adamw", "sgd") else 0.0


def sending(case: Case) -> Sending:
    """By the rule's own messages: see optim/reduced_stats.py and optim/rules/muon.py."""
    rule, layout = case.rule, case.layout
    assert rule is not None
    held = list(matrices(case, 0))
    ranks = policy_of(case).shards * layout.tp
    if rule.name == "muon":
        return _orthogonal(case, [one for one in held if is_muons(rule, one.name, one.shape)], ranks)
    if ranks == 1 or rule.name not in ("lamb", "adafactor", "sm3"):
        return Sending()
    stacks = sum(one.count * max(1, one.size // (one.shape[-1] * one.shape[-2])) for one in held if len(one.shape) > 1)
    sides = sum(one.count * _sides(rule, one) * _held(one) for one in held)
    sizes = {"lamb": [8 * stacks], "adafactor": [sides + 4 * stacks, 4 * stacks], "sm3": [sides]}[rule.name]
    wire = sum(on_the_wire("all_reduce", size, ranks) for size in sizes)
    return Sending(bytes=wire, messages=len(sizes))


def _orthogonal(case: Case, held: list[Matrix], ranks: int) -> Sending:
    """Every part goes to its owner and back, in the products' type; an owner makes whole matrices orthogonal."""
    size = 2 if case.on_gpu and case.element_bytes == 2 else 4
    parts = sum(one.count * one.size / (one.cut * one.shards) for one in held)
    flops = 0.0
    for one in held:
        short, long = sorted(one.shape[-2:])
        each = STEPS * (4.0 * short * short * long + 2.0 * short**3)
        flops += one.count * one.size / (short * long) * each / (one.cut * one.shards)
    sent = 2 * on_the_wire("all_to_all", parts * size, ranks) if ranks > 1 else 0.0
    return Sending(bytes=sent, messages=2 if ranks > 1 else 0, flops=flops)
