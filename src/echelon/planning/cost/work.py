"""`Work`: everything that one step does on one rank, counted, before anything is said about how fast.

Counts come from the model's shape, the layout and the strategies' own cost functions. All are of one microbatch through
all layers, unless they say otherwise, so that stages divide them. `stacked` puts many of them into arrays: what reads
them (time.py) prices thousands of layouts as quickly as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from echelon.layout import Layout
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.memory.offload import cost as offload_cost
from echelon.memory.offload.cost import OffloadTraffic, offload_traffic
from echelon.parallel.ep.expert_parallel import MAX_LOAD_FACTOR
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.planning.cluster.cluster import HOST_DEVICES
from echelon.planning.cluster.link_time import intra_node_latency
from echelon.planning.cost import optimizer_update
from echelon.planning.cost.comm_volume import dp_wire_bytes, tp_collectives, tp_wire_bytes
from echelon.planning.cost.cp_traffic import computed_attention, cp_traffic
from echelon.planning.cost.elementwise_traffic import elementwise_traffic
from echelon.planning.cost.expert_traffic import expert_traffic
from echelon.planning.cost.memory_model import offloaded_share
from echelon.planning.cost.param_group_traffic import (
    NUM_MOMENTS,
    gradient_bytes,
    max_layer_share,
    param_groups,
    sharding_policy,
    weight_traffic,
)
from echelon.planning.cost.recompute_cost import (
    compression_traffic,
    recompute_plan,
    recompute_shares,
    saved_layer_bytes,
)
from echelon.planning.model.model_shape import COLUMN_PARALLEL, ROUTER, ROW_PARALLEL, MatmulShape
from echelon.planning.scenario import ATTENTION_KERNELS, Scenario

Number = Any
"""a number, or an array of them"""
GENERATIONS = ("cpu", "volta", "ampere", "hopper", "blackwell")
CPU, VOLTA, AMPERE, HOPPER, BLACKWELL = range(len(GENERATIONS))
BUBBLE_SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", *ASYNC_SCHEDULES)
"""whose bubbles are told apart"""
LOW_PRECISION = {"fp8": 1, "fp4": 2}
"""types narrower than 16 bits; others are 0"""
GEMM_TILE = 64
"""elements: products are fast where it divides their dimensions"""
WIDE_HEAD_DIM = 128
"""elements from which a head is wide"""
LOGIT_TRAFFIC, FUSED_LOGIT_TRAFFIC = 8.0, 2.0
"""moved per logit, forward and for each of both gradients; where the head's loss is our kernel, which reads twice and
writes once in all"""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    # the devices
    generation: Number
    peak: Number
    """FLOPs per second of the products' type"""
    peak16: Number
    """of 16 bits"""
    memory: Number
    """bytes per second"""
    inside: Number
    outside: Number
    """bytes per second and device, between nodes"""
    latency: Number
    narrow: Number
    """0: products in 16 bits or more, 1: fp8, 2: fp4"""
    # the products
    flops: Number
    edges: Number
    """the products' FLOPs over the size of each of their three dimensions, summed: what partly filled tiles cost"""
    odd_flops: Number
    """of products with a dimension that tiles do not divide"""
    router_flops: Number
    """of routers in 32 bits, where ours are told apart"""
    expert_flops: Number
    """on the busiest rank"""
    expert_edges: Number
    head_flops: Number
    head_edges: Number
    loss_bytes: Number
    """moved by the loss and its gradient, a third of them: as much as if forward and both gradients moved the same"""
    # attention
    attention_flops: Number
    """of flash attention: causal, so half of the square"""
    scores: Number
    """elements of the square, where it is written out"""
    kernel: Number
    """place in case.KERNELS"""
    wide_heads: Number
    """1 where heads are as wide as WIDE_HEAD, or wider"""
    # memory
    passed: Number
    """elements that operators between products move, apart from `norms`"""
    norms: Number
    """elements that norms and residuals move"""
    passed_backward: Number
    """what all of these move in backward, to forward"""
    fused_norms: Number
    weight_bytes: Number
    """moved for the weights, beside products: casts to 8 bits, and their gradients to where they are added up"""
    packed: Number
    """bytes moved to keep activations in another form or place, and to have them back (thrift.py)"""
    layers: Number
    mixtures: Number
    """layers with experts"""
    # messages
    tp_bytes: Number
    """on the wire"""
    tp_hidden: Number
    """of these, what runs beside products: steps of a grid"""
    tp_messages: Number
    tp_near: Number
    """1 where tp stays inside a node"""
    tp_members: Number
    """ranks of a group that share a node"""
    ep_inside: Number
    """bytes to experts and back between devices of a node, on the busiest rank"""
    ep_outside: Number
    """between nodes"""
    ep_messages: Number
    ring_steps: Number
    """blocks of attention that a ring takes; 1: there is none"""
    ring_bytes: Number
    """of keys and values, in each step but the last"""
    ring_gradients: Number
    """of their gradients"""
    ring_near: Number
    cp_inside: Number
    """bytes of cp's collectives over a rank's link inside a node"""
    cp_outside: Number
    """over that between nodes"""
    cp_messages: Number
    by_blocks: Number
    """1 where attention is several calls"""
    cp_moved: Number
    """bytes through memory that cp asks for beside attention, forward and backward"""
    cp_moved_back: Number
    pp_bytes: Number
    """of one message"""
    pp_near: Number
    dp_bytes: Number
    """on the wire, in a step"""
    dp_near: Number
    dp_members: Number
    # the layout
    dp: Number
    tp: Number
    pp: Number
    vpp: Number
    accumulate: Number
    streams: Number
    """1 where parameters are gathered for every microbatch (zero 2 and 3)"""
    repeated: Number
    """share of the layers' forward that is recomputed"""
    repeated_attention: Number
    """share of attention, beside that"""
    repeated_passing: Number
    """share of the operators between products, beside that"""
    repeated_experts: Number
    """share of the experts, beside that: all of them where they work in rounds, of which nothing is kept"""
    slowest: Number
    """share of the layers on the fullest rank"""
    even: Number
    """1 where stages have equal numbers of layers, so that the head comes on top"""
    schedule: Number
    """place in SCHEDULES; 0 for those that are not there"""
    updated: Number
    """parameters whose states this rank updates, on the device"""
    update_bytes: Number
    """moved by their update; 0: as programs do"""
    update_flops: Number
    """of products of whole matrices"""
    update_sent: Number
    """bytes on the wire: numbers of rows and columns, or matrices to their owners and back"""
    update_messages: Number
    update_near: Number
    """1 where these stay inside a node"""
    # off the device
    host: Number
    """bytes per second to the host"""
    host_bytes: Number
    host_updated: Number
    """parameters that the host updates for this rank, and how many it can in a second"""
    host_updates: Number
    disk_seconds: Number


def stack_work(works: Sequence[StepWork]) -> StepWork:
    """Many as one, an array for each number."""
    return StepWork(
        **{field.name: np.array([getattr(work, field.name) for work in works]) for field in fields(StepWork)}
    )


def count_stacked_work(scenarios: Sequence[Scenario], *, include_per_step: bool = True) -> StepWork:
    """Of cases that do the same on every microbatch, as one. Without what is `once_a_step`, sooner: a bound."""
    if scenarios[0].layout.depth > 1 or scenarios[0].layout.recompute.startswith("budget"):  # these do not do the same
        return stack_work([count_work(case) for case in scenarios])
    steps = [_step_work(case, include_per_step) for case in scenarios]
    return StepWork(
        **_microbatch_work(scenarios[0]), **{name: np.array([step[name] for step in steps]) for name in steps[0]}
    )


def count_work(scenario: Scenario, *, include_per_step: bool = True) -> StepWork:
    return StepWork(**_microbatch_work(scenario), **_step_work(scenario, include_per_step))


def _microbatch_work(case: Scenario) -> dict[str, Any]:
    """What layouts that differ in pp, dp, zero and schedule have in common."""
    layout, shape, cluster = case.layout, case.shape, case.cluster
    device = cluster.device
    tokens, tp = case.tokens, layout.tp
    counts = dict.fromkeys(
        ("flops", "edges", "odd_flops", "router_flops", "expert_flops", "expert_edges", "attention_flops", "scores"),
        0.0,
    )
    head_dim = 0
    for layer, n in shape.layers:
        for product in layer.matmuls:
            flops, edges = _gemm_work(product, tokens, case)
            if case.has_kernels and product.name == ROUTER:
                counts["router_flops"] += n * flops / case.sp_degree
                continue
            kind = "expert_" if product.experts else ""
            counts[kind + "flops"] += n * flops
            counts[kind + "edges"] += n * edges
            if not product.experts and _is_misaligned(product, layout):
                counts["odd_flops"] += n * flops
        if layer.attention is not None:
            attention = computed_attention(case, layer.attention)
            counts["attention_flops"] += n * attention.flops(case.seq_len) * tokens / tp
            counts["scores"] += n * layer.attention.heads / tp * tokens * case.seq_len
            head_dim = max(head_dim, layer.attention.head_dim)
    columns = shape.vocab / tp
    head = 2.0 * tokens * shape.width * columns
    per_node = cluster.per_node
    sent, reach, routed = tp_collectives(case), cp_traffic(case), expert_traffic(case)
    again, passing = recompute_shares(case), elementwise_traffic(case)
    return {
        **counts,
        "generation": GENERATIONS.index(device.generation),
        "peak": device.peak(case.precision),
        "peak16": device.peak("bf16"),
        "memory": device.bandwidth,
        "inside": cluster.intra_node.bandwidth,
        "outside": cluster.inter_node.bandwidth,
        "latency": intra_node_latency(cluster),
        "narrow": LOW_PRECISION.get(case.precision, 0) if case.precision in device.flops else 0,
        "head_flops": head,
        "head_edges": head * (1 / tokens + 1 / shape.width + 1 / columns),
        "loss_bytes": tokens * columns * (FUSED_LOGIT_TRAFFIC if case.has_kernels and tp == 1 else LOGIT_TRAFFIC),
        "kernel": ATTENTION_KERNELS.index(
            "plain" if case.materializes_scores and case.attention_kernel == "best" else case.attention_kernel
        ),
        "wide_heads": head_dim >= WIDE_HEAD_DIM,
        "passed": passing.others,
        "norms": passing.norms,
        "passed_backward": passing.backward_ratio,
        "fused_norms": case.fused_norms,
        "packed": compression_traffic(case),
        "layers": shape.num_layers,
        "mixtures": shape.num_moe_layers,
        "tp": tp,
        "tp_bytes": tp_wire_bytes(sent, layout),
        "tp_hidden": tp_wire_bytes([item for item in sent if item.overlapped], layout),
        "tp_messages": sum(item.count for item in sent),
        "tp_near": tp <= per_node,
        "tp_members": min(tp, per_node),
        "ep_inside": routed.intra_node_bytes,
        "ep_outside": routed.inter_node_bytes,
        "ep_messages": routed.num_collectives,
        "ring_steps": reach.ring_steps,
        "ring_bytes": reach.ring_bytes,
        "ring_gradients": reach.ring_grad_bytes,
        "ring_near": reach.ring_in_node,
        "cp_inside": reach.intra_node_bytes,
        "cp_outside": reach.inter_node_bytes,
        "cp_messages": reach.num_collectives,
        "by_blocks": reach.is_blockwise,
        "cp_moved": reach.memory_bytes,
        "cp_moved_back": reach.memory_bytes_backward,
        "repeated": again.forward,
        "repeated_attention": again.attention,
        "repeated_passing": again.elementwise,
        "repeated_experts": case.expert_load > MAX_LOAD_FACTOR,  # in rounds nothing is kept (rounds.py)
    }


def _step_work(case: Scenario, include_per_step: bool) -> dict[str, Any]:
    """The rest: how microbatches follow each other, and what is done once a step, if that is asked for."""
    layout, shape, cluster = case.layout, case.shape, case.cluster
    per_node, ranks, stages = cluster.per_node, layout.dp * layout.cp, layout.pp * layout.vpp
    updated, away, sending = 0.0, OffloadTraffic(), optimizer_update.UpdateComm()
    if include_per_step:
        units = param_groups(case, 0)
        updated = sum(unit.shard_numel * n for unit, n in units)
        sending = optimizer_update.update_comm(case) if case.optimizer is not None else sending
        if layout.offload != "none":
            done = recompute_plan(case)
            away = offload_traffic(
                layout.offload,
                shard_params=updated,
                activation_bytes=sum(n * saved_layer_bytes(case, layer, done) for layer, n in shape.layers) / layout.pp,
                accumulate=layout.accumulate,
                compute_bytes=case.element_bytes,
                gradient_bytes=gradient_bytes(case),
                state_bytes=4 + NUM_MOMENTS * case.moment_bytes,
                offloaded_share=offloaded_share(case),
            )
    device_host = min(per_node, HOST_DEVICES)
    own = not sharding_policy(case).accumulates_grads or offload_cost.offloads_params(layout.offload)
    states = case.optimizer.states if case.optimizer is not None else "float32"
    return {
        "weight_bytes": weight_traffic(case),
        "pp_bytes": case.tokens * shape.width * case.element_bytes / case.sp_degree if layout.pp > 1 else 0.0,
        "pp_near": layout.tp * ranks * layout.pp <= per_node,  # dp lies inside pp in the mesh
        "dp_bytes": dp_wire_bytes(case) if include_per_step else 0.0,
        "dp_near": layout.tp * ranks <= per_node,
        "dp_members": max(1.0, min(per_node / layout.tp, ranks)),
        "dp": ranks,
        "pp": layout.pp,
        "vpp": layout.vpp,
        "accumulate": layout.accumulate,
        "streams": sharding_policy(case).reduce_scatter_every_microbatch,
        "slowest": max_layer_share(case),
        "even": shape.num_layers % stages == 0,
        "schedule": BUBBLE_SCHEDULES.index(layout.schedule) if layout.schedule in BUBBLE_SCHEDULES else 0,
        "updated": updated - away.host_updated_params,
        "update_bytes": optimizer_update.update_traffic(case) * (updated - away.host_updated_params),
        "update_flops": sending.flops,
        "update_sent": sending.wire_bytes,
        "update_messages": sending.num_collectives,
        "update_near": layout.tp * ranks <= per_node,
        "host": (cluster.curves.host if cluster.curves else 0.0) or cluster.device.host_link.bandwidth,
        "host_bytes": away.link_bytes,
        "host_updated": away.host_updated_params,
        "host_updates": 1
        / offload_cost.host_update_seconds(case.moment_bytes, states, gradient_on_host=own)
        / device_host,
        "disk_seconds": away.disk_bytes / (cluster.disk_bandwidth / device_host),
    }


def _gemm_work(gemm: MatmulShape, tokens: float, case: Scenario) -> tuple[float, float]:
    """(FLOPs, edges) of a product, forward, on one rank."""
    layout, inputs, outputs = case.layout, float(gemm.inputs), float(gemm.outputs)
    if gemm.experts:
        # Experts are spread over ep ranks, each of which sends its tokens: every expert gets those of all of them.
        mine = case.expert_load * tokens * layout.etp / layout.tp
        rows = max(1.0, mine * gemm.token_share * layout.ep / gemm.experts)
        outputs = outputs / layout.etp if gemm.split == COLUMN_PARALLEL else outputs
        inputs = inputs / layout.etp if gemm.split == ROW_PARALLEL else inputs
        flops = 2.0 * mine * gemm.token_share * inputs * outputs
        return flops, flops * (1 / rows + 1 / inputs + 1 / outputs)
    if layout.tp_kind != "1d":
        sides = tp_grid_cost.grid_shape(layout)
        rows = sides.z if layout.tp_kind == "3d" else sides.batch_parts
        flops = 2.0 * tokens * inputs * outputs / layout.tp
        return flops, flops * (rows / tokens + sides.x / inputs + sides.x / outputs)
    if gemm.split == COLUMN_PARALLEL:
        outputs /= layout.tp
    elif gemm.split == ROW_PARALLEL:
        inputs /= layout.tp
    flops = 2.0 * tokens * inputs * outputs
    return flops, flops * (1 / tokens + 1 / inputs + 1 / outputs)


def _is_misaligned(gemm: MatmulShape, layout: Layout) -> bool:
    inputs = gemm.inputs // layout.tp if gemm.split == ROW_PARALLEL else gemm.inputs
    outputs = gemm.outputs // layout.tp if gemm.split == COLUMN_PARALLEL else gemm.outputs
    return bool(inputs % GEMM_TILE or outputs % GEMM_TILE)
