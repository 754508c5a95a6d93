"""State, traffic and collectives of the optimizer on a rank: optim/cost.py applied to the matrices of a model's shape.

Element-wise state is sharded as parameters are; row and column statistics are on every rank that may hold a part of
their matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, prod

from echelon.layout.collective import wire_bytes
from echelon.memory.offload.cost import PAGE_BYTES, offloads_optimizer, split_into_pages
from echelon.optim import cost, offload_support
from echelon.optim.cost import NEWTON_SCHULZ_STEPS
from echelon.optim.optimizer_groups import is_muon_matrix
from echelon.optim.update_rule import UpdateRule
from echelon.parallel.tp import cost as tp_cost
from echelon.planning.cost.param_group_traffic import OUTSIDE_GROUP, param_groups
from echelon.planning.cost.step_work import UpdateWork
from echelon.planning.model.adapter_shapes import adapter_shapes
from echelon.planning.model.model_shape import COLUMN_PARALLEL, ROW_PARALLEL, LayerShape
from echelon.planning.scenario import NUM_MOMENTS, Scenario

MAX_PAGED_LAYERS = 4096
"""layers whose pages are counted one by one"""


@dataclass(frozen=True)
class ParamMatrix:
    """Parameters of one shape on a rank."""

    name: str
    shape: tuple[int, ...]
    count: float
    """parameters of this shape"""
    model_ranks: int = 1
    """tp or ep ranks that divide each"""
    shards: int = 1
    """data-parallel ranks that shard the rest"""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_matrices(self) -> int:
        """Matrices that the parameter stacks: one for each expert."""
        return self.numel // (self.shape[-1] * self.shape[-2])

    @property
    def local_share(self) -> float:
        """Share of the stacked matrices that a rank may hold a part of: experts on other ranks are left out."""
        return 1 / self.model_ranks if len(self.shape) > 2 else 1.0


def optimizer_state_bytes(scenario: Scenario, rule: UpdateRule, stage: int) -> int:
    """Bytes of optimizer state on a rank."""
    total = 0.0
    for matrix in param_matrices(scenario, stage):
        full = cost.state_bytes(rule, matrix.shape, name=matrix.name)
        factored = _factored_bytes(rule, matrix)
        shard = (full - factored) / (matrix.model_ranks * matrix.shards)
        total += matrix.count * (shard + factored * matrix.local_share)
    return round(total)


def _factored_bytes(rule: UpdateRule, matrix: ParamMatrix) -> float:
    """Bytes of row and column statistics."""
    if rule.name not in ("adafactor", "sm3") or len(matrix.shape) < 2:
        return 0.0
    return 4.0 * matrix.num_matrices * (matrix.shape[-1] + matrix.shape[-2])


def param_matrices(scenario: Scenario, stage: int) -> Iterator[ParamMatrix]:
    """Yield the trained parameters of a rank, by shape."""
    layout, shape = scenario.layout, scenario.shape
    shards, width = scenario.sharding_policy.num_shards, shape.width
    ranks = tp_cost.num_weight_shards(layout)
    if scenario.lora_rank:
        for layer, n in shape.layers:
            yield from _adapter_matrices(scenario, layer, n * scenario.max_layer_share)
        return
    for layer, n in shape.layers:
        yield from _layer_matrices(scenario, layer, n * scenario.max_layer_share)
    if stage == 0:
        yield ParamMatrix("embed.weight", (shape.vocab, width), 1, ranks, shards)
        if shape.position_parameters:
            yield ParamMatrix("positions.weight", (shape.position_parameters // width, width), 1, ranks, shards)
    if stage == layout.pp - 1:
        yield ParamMatrix("norm", (width,), shape.other_parameters / width, ranks, shards)
        if not (shape.tied and layout.pp == 1):
            yield ParamMatrix("head.weight", (shape.vocab, width), 1, ranks, shards)


def _adapter_matrices(scenario: Scenario, layer: LayerShape, count: float) -> Iterator[ParamMatrix]:
    """The two factors of each adapter: tp divides B of a column-parallel linear, A of a row-parallel one."""
    rank, tp, shards = scenario.lora_rank, scenario.layout.tp, scenario.sharding_policy.num_shards
    for adapter in adapter_shapes(scenario.shape, layer, scenario.lora_targets):
        gemm, copies = adapter.gemm, count * adapter.share
        split_a, split_b = gemm.split == ROW_PARALLEL, gemm.split == COLUMN_PARALLEL
        yield ParamMatrix("lora.A", (rank, gemm.inputs), copies, tp if split_a else 1, shards)
        yield ParamMatrix("lora.B", (adapter.outputs, rank), copies, tp if split_b else 1, shards)


def _layer_matrices(scenario: Scenario, layer: LayerShape, count: float) -> Iterator[ParamMatrix]:
    layout, width, shards = scenario.layout, scenario.shape.width, scenario.sharding_policy.num_shards
    ranks = tp_cost.num_weight_shards(layout)
    for matmul in layer.matmuls:
        outputs = matmul.fused_outputs or (matmul.outputs,)
        if matmul.experts:
            stacked = (len(outputs),) if len(outputs) > 1 else ()
            shape = (matmul.experts, *stacked, outputs[0], matmul.inputs)
            yield ParamMatrix("experts.weight", shape, count, layout.ep * layout.etp, layout.num_expert_shards)
            continue
        for rows in outputs:
            yield ParamMatrix("weight", (rows, matmul.inputs), count, ranks if matmul.split else 1, shards)
    if layer.other_parameters:
        yield ParamMatrix("norm", (width,), count * layer.other_parameters / width, 1, shards)


def updates_in_backward(scenario: Scenario) -> bool:
    """Whether backward updates each parameter group and frees its gradients: in steps of one microbatch."""
    rule, layout = scenario.optimizer, scenario.layout
    return rule is not None and rule.in_backward and layout.accumulate * layout.pp == 1


def live_gradient_bytes(scenario: Scenario) -> int:
    """Bytes of gradients at once under an update in backward: of two layers, the embedding and the head."""
    groups = [group for group, _ in param_groups(scenario, 0) if group.trainable]
    numels = [(group.num_shards * group.shard_numel, group.module) for group in groups]
    largest_layer = max(numel for numel, name in numels if name != OUTSIDE_GROUP)
    outside = sum(numel for numel, name in numels if name == OUTSIDE_GROUP)
    return scenario.gradient_bytes * (2 * largest_layer + outside)


def paged_group_bytes(scenario: Scenario, stage: int) -> list[int]:
    """State bytes of the parameter groups that the device updates while they live on the host, in the update's order.

    Empty where the host updates, or nothing is offloaded.
    """
    rule = scenario.optimizer
    if rule is None or not (offloads_optimizer(scenario.layout.offload) and offload_support.updates_on_device(rule)):
        return []
    trainable = [(group, n) for group, n in param_groups(scenario, stage) if group.trainable]
    groups = sorted(trainable, key=lambda item: item[0].module != OUTSIDE_GROUP)
    numel = sum(n * group.shard_numel for group, n in groups)
    per_element = scenario.master_bytes + optimizer_state_bytes(scenario, rule, stage) / max(1.0, numel)
    return [
        size
        for group, n in groups
        for size in [round(group.shard_numel * per_element)] * min(ceil(n), MAX_PAGED_LAYERS)
    ]


def update_work(scenario: Scenario, num_params: float) -> UpdateWork:
    """Count the update of `num_params` parameters on the device."""
    rule = scenario.optimizer
    # Kernels of AdamW read and write master weight and moments, and read the gradient twice, once for the norm.
    traffic = 2 * (scenario.master_bytes + NUM_MOMENTS * scenario.moment_bytes) + 2 * scenario.gradient_bytes
    if rule is not None:
        traffic = cost.update_traffic_bytes(rule, gradient_bytes=scenario.gradient_bytes)
    if not scenario.has_kernels and (rule is None or rule.name in ("adamw", "sgd")):
        traffic = 0.0  # what other frameworks move: step_time.py
    communication = update_comm(scenario, rule) if rule is not None else UpdateWork()
    pages = split_into_pages(paged_group_bytes(scenario, 0), PAGE_BYTES)
    communication = replace(communication, num_collectives=communication.num_collectives * max(1, len(pages)))
    return replace(communication, num_params=num_params, memory_bytes=traffic * num_params)


def update_comm(scenario: Scenario, rule: UpdateRule) -> UpdateWork:
    """Count the collectives and GEMMs of an update: see optim/reduced_stats.py and optim/rules/muon.py."""
    layout = scenario.layout
    params = list(param_matrices(scenario, 0))
    ranks = scenario.sharding_policy.num_shards * layout.tp
    if rule.name == "muon":
        return _muon_comm(scenario, [one for one in params if is_muon_matrix(rule, one.name, one.shape)], ranks)
    if ranks == 1 or rule.name not in ("lamb", "adafactor", "sm3"):
        return UpdateWork()
    matrices = sum(one.count * max(1, one.num_matrices) for one in params if len(one.shape) > 1)
    factored = sum(one.count * _factored_bytes(rule, one) * one.local_share for one in params)
    sizes = {"lamb": [8 * matrices], "adafactor": [factored + 4 * matrices, 4 * matrices], "sm3": [factored]}[rule.name]
    wire = sum(wire_bytes("all_reduce", size, ranks) for size in sizes)
    return UpdateWork(wire_bytes=wire, num_collectives=len(sizes))


def _muon_comm(scenario: Scenario, params: list[ParamMatrix], ranks: int) -> UpdateWork:
    """Count Muon: shards go to the owner of their matrix and back, and owners orthogonalize full matrices."""
    size = 2 if scenario.on_gpu and scenario.element_bytes == 2 else 4
    numel = sum(one.count * one.numel / (one.model_ranks * one.shards) for one in params)
    flops = 0.0
    for one in params:
        short, long = sorted(one.shape[-2:])
        matrix_flops = NEWTON_SCHULZ_STEPS * (4.0 * short * short * long + 2.0 * short**3)
        flops += one.count * one.numel / (short * long) * matrix_flops / (one.model_ranks * one.shards)
    if ranks == 1:
        return UpdateWork(flops=flops)
    return UpdateWork(wire_bytes=2 * wire_bytes("all_to_all", numel * size, ranks), num_collectives=2, flops=flops)
