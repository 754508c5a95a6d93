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
from echelon.layout.layout import ASYNCHRONOUS
from echelon.memory.offload import cost as offload_cost
from echelon.memory.offload.cost import Moved, moved
from echelon.parallel.ep.expert_parallel import CEILING
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.planning.cluster.cluster import HOST_DEVICES
from echelon.planning.cluster.link_time import latency_of
from echelon.planning.cost import optimizer_update
from echelon.planning.cost.comm_volume import gradient_wire, messages, tensor_wire
from echelon.planning.cost.cp_traffic import attended, reach_of
from echelon.planning.cost.elementwise_traffic import passing_of
from echelon.planning.cost.expert_traffic import to_experts
from echelon.planning.cost.memory_model import share_away
from echelon.planning.cost.param_group_traffic import (
    MOMENTS,
    fullest_share,
    gradient_bytes,
    policy_of,
    units_of,
    weight_bytes,
)
from echelon.planning.cost.recompute_cost import doing, kept_of, moved_to_keep, repeated_of
from echelon.planning.model.model_shape import COLUMNS, ROUTER, ROWS, Product
from echelon.planning.scenario import KERNELS, Case

Number = Any
"""a number, or an array of them"""
GENERATIONS = ("cpu", "volta", "ampere", "hopper", "blackwell")
CPU, VOLTA, AMPERE, HOPPER, BLACKWELL = range(len(GENERATIONS))
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", *ASYNCHRONOUS)
"""whose bubbles are told apart"""
NARROW = {"fp8": 1, "fp4": 2}
"""types narrower than 16 bits; others are 0"""
TILE = 64
"""elements: products are fast where it divides their dimensions"""
WIDE_HEAD = 128
"""elements from which a head is wide"""
LOSS_BYTES, CHUNK_LOSS_BYTES = 8.0, 2.0
"""moved per logit, forward and for each of both gradients; where the head's loss is our kernel, which reads twice and
writes once in all"""


@dataclass(frozen=True, kw_only=True)
class Work:
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


def stacked(works: Sequence[Work]) -> Work:
    """Many as one, an array for each number."""
    return Work(**{field.name: np.array([getattr(work, field.name) for work in works]) for field in fields(Work)})


def works_of(cases: Sequence[Case], *, once_a_step: bool = True) -> Work:
    """Of cases that do the same on every microbatch, as one. Without what is `once_a_step`, sooner: a bound."""
    if cases[0].layout.depth > 1 or cases[0].layout.recompute.startswith("budget"):  # these do not do the same
        return stacked([work_of(case) for case in cases])
    steps = [_of_step(case, once_a_step) for case in cases]
    return Work(**_of_microbatch(cases[0]), **{name: np.array([step[name] for step in steps]) for name in steps[0]})


def work_of(case: Case, *, once_a_step: bool = True) -> Work:
    return Work(**_of_microbatch(case), **_of_step(case, once_a_step))


def _of_microbatch(case: Case) -> dict[str, Any]:
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
        for product in layer.products:
            flops, edges = _product(product, tokens, case)
            if case.has_kernels and product.name == ROUTER:
                counts["router_flops"] += n * flops / case.sliced
                continue
            kind = "expert_" if product.experts else ""
            counts[kind + "flops"] += n * flops
            counts[kind + "edges"] += n * edges
            if not product.experts and _is_odd(product, layout):
                counts["odd_flops"] += n * flops
        if layer.attention is not None:
            attention = attended(case, layer.attention)
            counts["attention_flops"] += n * attention.flops(case.seq_len) * tokens / tp
            counts["scores"] += n * layer.attention.heads / tp * tokens * case.seq_len
            head_dim = max(head_dim, layer.attention.head_dim)
    columns = shape.vocab / tp
    head = 2.0 * tokens * shape.width * columns
    per_node = cluster.per_node
    sent, reach, routed = messages(case), reach_of(case), to_experts(case)
    again, passing = repeated_of(case), passing_of(case)
    return {
        **counts,
        "generation": GENERATIONS.index(device.generation),
        "peak": device.peak(case.precision),
        "peak16": device.peak("bf16"),
        "memory": device.bandwidth,
        "inside": cluster.inside.bandwidth,
        "outside": cluster.outside.bandwidth,
        "latency": latency_of(cluster),
        "narrow": NARROW.get(case.precision, 0) if case.precision in device.flops else 0,
        "head_flops": head,
        "head_edges": head * (1 / tokens + 1 / shape.width + 1 / columns),
        "loss_bytes": tokens * columns * (CHUNK_LOSS_BYTES if case.has_kernels and tp == 1 else LOSS_BYTES),
        "kernel": KERNELS.index("plain" if case.writes_scores and case.attention == "best" else case.attention),
        "wide_heads": head_dim >= WIDE_HEAD,
        "passed": passing.others,
        "norms": passing.norms,
        "passed_backward": passing.backward,
        "fused_norms": case.fused_norms,
        "packed": moved_to_keep(case),
        "layers": shape.num_layers,
        "mixtures": shape.mixtures,
        "tp": tp,
        "tp_bytes": tensor_wire(sent, layout),
        "tp_hidden": tensor_wire([item for item in sent if item.hidden], layout),
        "tp_messages": sum(item.count for item in sent),
        "tp_near": tp <= per_node,
        "tp_members": min(tp, per_node),
        "ep_inside": routed.inside,
        "ep_outside": routed.outside,
        "ep_messages": routed.messages,
        "ring_steps": reach.steps,
        "ring_bytes": reach.sent,
        "ring_gradients": reach.sent_back,
        "ring_near": reach.near,
        "cp_inside": reach.inside,
        "cp_outside": reach.outside,
        "cp_messages": reach.messages,
        "by_blocks": reach.by_blocks,
        "cp_moved": reach.moved,
        "cp_moved_back": reach.moved_back,
        "repeated": again.forward,
        "repeated_attention": again.attention,
        "repeated_passing": again.passing,
        "repeated_experts": case.crowd > CEILING,  # in rounds nothing is kept (rounds.py)
    }


def _of_step(case: Case, once_a_step: bool) -> dict[str, Any]:
    """The rest: how microbatches follow each other, and what is done once a step, if that is asked for."""
    layout, shape, cluster = case.layout, case.shape, case.cluster
    per_node, ranks, stages = cluster.per_node, layout.dp * layout.cp, layout.pp * layout.vpp
    updated, away, sending = 0.0, Moved(), optimizer_update.Sending()
    if once_a_step:
        units = units_of(case, 0)
        updated = sum(unit.shard_numel * n for unit, n in units)
        sending = optimizer_update.sending(case) if case.rule is not None else sending
        if layout.offload != "none":
            done = doing(case)
            away = moved(
                layout.offload,
                updated=updated,
                activations=sum(n * kept_of(case, layer, done) for layer, n in shape.layers) / layout.pp,
                accumulate=layout.accumulate,
                compute_bytes=case.element_bytes,
                gradient_bytes=gradient_bytes(case),
                state_bytes=4 + MOMENTS * case.moment_bytes,
                share=share_away(case),
            )
    device_host = min(per_node, HOST_DEVICES)
    own = not policy_of(case).sums_gradients or offload_cost.pages(layout.offload)
    states = case.rule.states if case.rule is not None else "float32"
    return {
        "weight_bytes": weight_bytes(case),
        "pp_bytes": case.tokens * shape.width * case.element_bytes / case.sliced if layout.pp > 1 else 0.0,
        "pp_near": layout.tp * ranks * layout.pp <= per_node,  # dp lies inside pp in the mesh
        "dp_bytes": gradient_wire(case) if once_a_step else 0.0,
        "dp_near": layout.tp * ranks <= per_node,
        "dp_members": max(1.0, min(per_node / layout.tp, ranks)),
        "dp": ranks,
        "pp": layout.pp,
        "vpp": layout.vpp,
        "accumulate": layout.accumulate,
        "streams": policy_of(case).scatter_every_microbatch,
        "slowest": fullest_share(case),
        "even": shape.num_layers % stages == 0,
        "schedule": SCHEDULES.index(layout.schedule) if layout.schedule in SCHEDULES else 0,
        "updated": updated - away.updated,
        "update_bytes": optimizer_update.moved_bytes(case) * (updated - away.updated),
        "update_flops": sending.flops,
        "update_sent": sending.bytes,
        "update_messages": sending.messages,
        "update_near": layout.tp * ranks <= per_node,
        "host": (cluster.curves.host if cluster.curves else 0.0) or cluster.device.host.bandwidth,
        "host_bytes": away.link,
        "host_updated": away.updated,
        "host_updates": 1 / offload_cost.update_seconds(case.moment_bytes, states, own=own) / device_host,
        "disk_seconds": away.disk / (cluster.disk_bandwidth / device_host),
    }


def _product(product: Product, tokens: float, case: Case) -> tuple[float, float]:
    """(FLOPs, edges) of a product, forward, on one rank."""
    layout, inputs, outputs = case.layout, float(product.inputs), float(product.outputs)
    if product.experts:
        # Experts are spread over ep ranks, each of which sends its tokens: every expert gets those of all of them.
        mine = case.crowd * tokens * layout.etp / layout.tp
        rows = max(1.0, mine * product.share * layout.ep / product.experts)
        outputs = outputs / layout.etp if product.split == COLUMNS else outputs
        inputs = inputs / layout.etp if product.split == ROWS else inputs
        flops = 2.0 * mine * product.share * inputs * outputs
        return flops, flops * (1 / rows + 1 / inputs + 1 / outputs)
    if layout.tp_kind != "1d":
        sides = tp_grid_cost.grid_of(layout)
        rows = sides.z if layout.tp_kind == "3d" else sides.rows
        flops = 2.0 * tokens * inputs * outputs / layout.tp
        return flops, flops * (rows / tokens + sides.x / inputs + sides.x / outputs)
    if product.split == COLUMNS:
        outputs /= layout.tp
    elif product.split == ROWS:
        inputs /= layout.tp
    flops = 2.0 * tokens * inputs * outputs
    return flops, flops * (1 / tokens + 1 / inputs + 1 / outputs)


def _is_odd(product: Product, layout: Layout) -> bool:
    inputs = product.inputs // layout.tp if product.split == ROWS else product.inputs
    outputs = product.outputs // layout.tp if product.split == COLUMNS else product.outputs
    return bool(inputs % TILE or outputs % TILE)
