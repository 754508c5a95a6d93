"""What an optimizer holds, moves and sends on a rank: its own cost functions (optim/cost.py), asked of a shape.

A shape knows matrices and vectors. What belongs to single elements is divided as parameters are; numbers of rows and
columns are on every rank that may hold a part of their matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from echelon.optim import cost
from echelon.optim.optimizer_groups import is_muon_matrix
from echelon.optim.update_rule import UpdateRule
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.planning.cluster.link_time import wire_bytes
from echelon.planning.cost.param_group_traffic import (
    EXPERT_GROUP,
    adamw_traffic,
    data_parallel_ranks,
    gradient_bytes,
    max_layer_share,
    param_groups,
    sharding_policy,
)
from echelon.planning.cost.step_work import UpdateWork
from echelon.planning.model.model_shape import LayerShape
from echelon.planning.scenario import Scenario

NEWTON_SCHULZ_STEPS = 5
"""of Newton and Schulz (optim/rules/muon.py)"""


@dataclass(frozen=True)
class ParamMatrix:
    """Parameters of one shape, on the rank."""

    name: str
    shape: tuple[int, ...]
    count: float
    """of them"""
    model_ranks: int = 1
    """ranks of tp or of experts that divide each"""
    shards: int = 1
    """data-parallel ranks that divide what is left"""

    @property
    def size(self) -> int:
        found = 1
        for side in self.shape:
            found *= side
        return found


def optimizer_state_bytes(scenario: Scenario, rule: UpdateRule, stage: int) -> int:
    """Of a rank, between steps."""
    total = 0.0
    for one in param_matrices(scenario, stage):
        whole = cost.state_bytes(rule, one.shape, name=one.name)
        sides = _factored_bytes(rule, one)
        total += one.count * ((whole - sides) / (one.model_ranks * one.shards) + sides * _local_share(one))
    return round(total)


def _factored_bytes(rule: UpdateRule, one: ParamMatrix) -> float:
    """Bytes of numbers of rows and columns."""
    if rule.name not in ("adafactor", "sm3") or len(one.shape) < 2:
        return 0.0
    stack = one.size // (one.shape[-1] * one.shape[-2])
    return 4.0 * stack * (one.shape[-1] + one.shape[-2])


def _local_share(one: ParamMatrix) -> float:
    """Share of the matrices of a stack of which a rank may hold something: experts elsewhere are left out."""
    return 1 / one.model_ranks if len(one.shape) > 2 else 1.0


def param_matrices(scenario: Scenario, stage: int) -> Iterator[ParamMatrix]:
    """The parameters of a rank, by shape."""
    layout, shape = scenario.layout, scenario.shape
    shards, width = sharding_policy(scenario).num_shards, shape.width
    ranks = tp_grid_cost.num_weight_shards(layout)
    for layer, n in shape.layers:
        yield from _layer_matrices(scenario, layer, n * max_layer_share(scenario), shards, ranks)
    if stage == 0:
        yield ParamMatrix("embed.weight", (shape.vocab, width), 1, ranks, shards)
        if shape.position_parameters:
            yield ParamMatrix("positions.weight", (shape.position_parameters // width, width), 1, ranks, shards)
    if stage == layout.pp - 1:
        yield ParamMatrix("norm", (width,), shape.other_parameters / width, ranks, shards)
        if not (shape.tied and layout.pp == 1):
            yield ParamMatrix("head.weight", (shape.vocab, width), 1, ranks, shards)


def _layer_matrices(
    scenario: Scenario, layer: LayerShape, count: float, shards: int, ranks: int
) -> Iterator[ParamMatrix]:
    layout = scenario.layout
    for product in layer.matmuls:
        parts = product.fused_outputs or (product.outputs,)
        if product.experts:
            among = data_parallel_ranks(scenario, EXPERT_GROUP) if layout.zero else 1
            shape = (product.experts, *((len(parts),) if len(parts) > 1 else ()), parts[0], product.inputs)
            yield ParamMatrix("experts.weight", shape, count, layout.ep * layout.etp, among)
            continue
        for outputs in parts:
            yield ParamMatrix("weight", (outputs, product.inputs), count, ranks if product.split else 1, shards)
    if layer.other_parameters:
        yield ParamMatrix(
            "norm", (scenario.shape.width,), count * layer.other_parameters / scenario.shape.width, 1, shards
        )


# -- gradients that are let go ----------------------------------------------------------------------------------------


def updates_in_backward(scenario: Scenario) -> bool:
    """Each unit is updated in backward, and its gradients are let go: in a step of one microbatch."""
    rule, layout = scenario.optimizer, scenario.layout
    return rule is not None and rule.in_backward and layout.accumulate * layout.pp == 1


def live_gradient_bytes(scenario: Scenario) -> int:
    """Bytes of gradients that are there at once: of two layers, and of what lies around them."""
    size = scenario.reduce_bytes if sharding_policy(scenario).accumulates_grads else scenario.element_bytes
    found = [(unit.num_shards * unit.shard_numel, unit.name) for unit, _ in param_groups(scenario, 0)]
    layers = sorted((numel for numel, name in found if name != "ends"), reverse=True)
    ends = sum(numel for numel, name in found if name == "ends")
    return size * (2 * layers[0] + ends)


# -- time -------------------------------------------------------------------------------------------------------------


def update_work(scenario: Scenario, num_params: float) -> UpdateWork:
    """Count the update of `num_params` parameters on the device."""
    memory_bytes = update_traffic(scenario) * num_params
    if scenario.optimizer is None:
        return UpdateWork(num_params=num_params, memory_bytes=memory_bytes)
    return replace(update_comm(scenario), num_params=num_params, memory_bytes=memory_bytes)


def update_traffic(scenario: Scenario) -> float:
    """Of an element; 0: as programs do."""
    if scenario.optimizer is None:
        return adamw_traffic(scenario)
    found = cost.update_traffic_bytes(scenario.optimizer, gradient_bytes=gradient_bytes(scenario))
    return found if scenario.has_kernels or scenario.optimizer.name not in ("adamw", "sgd") else 0.0


def update_comm(scenario: Scenario) -> UpdateWork:
    """By the rule's own messages: see optim/reduced_stats.py and optim/rules/muon.py."""
    rule, layout = scenario.optimizer, scenario.layout
    assert rule is not None
    held = list(param_matrices(scenario, 0))
    ranks = sharding_policy(scenario).num_shards * layout.tp
    if rule.name == "muon":
        return _muon_comm(scenario, [one for one in held if is_muon_matrix(rule, one.name, one.shape)], ranks)
    if ranks == 1 or rule.name not in ("lamb", "adafactor", "sm3"):
        return UpdateWork()
    stacks = sum(one.count * max(1, one.size // (one.shape[-1] * one.shape[-2])) for one in held if len(one.shape) > 1)
    sides = sum(one.count * _factored_bytes(rule, one) * _local_share(one) for one in held)
    sizes = {"lamb": [8 * stacks], "adafactor": [sides + 4 * stacks, 4 * stacks], "sm3": [sides]}[rule.name]
    wire = sum(wire_bytes("all_reduce", size, ranks) for size in sizes)
    return UpdateWork(wire_bytes=wire, num_collectives=len(sizes))


def _muon_comm(scenario: Scenario, held: list[ParamMatrix], ranks: int) -> UpdateWork:
    """Every part goes to its owner and back, in the products' type; an owner makes whole matrices orthogonal."""
    size = 2 if scenario.on_gpu and scenario.element_bytes == 2 else 4
    parts = sum(one.count * one.size / (one.model_ranks * one.shards) for one in held)
    flops = 0.0
    for one in held:
        short, long = sorted(one.shape[-2:])
        each = NEWTON_SCHULZ_STEPS * (4.0 * short * short * long + 2.0 * short**3)
        flops += one.count * one.size / (short * long) * each / (one.model_ranks * one.shards)
    sent = 2 * wire_bytes("all_to_all", parts * size, ranks) if ranks > 1 else 0.0
    return UpdateWork(wire_bytes=sent, num_collectives=2 if ranks > 1 else 0, flops=flops)
