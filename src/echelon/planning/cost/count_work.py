"""Counts the work of a step (step_work.py) from the model's shape, the layout and the strategies' cost functions."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.memory.offload import cost as offload_cost
from echelon.memory.offload.cost import OffloadTraffic, offload_traffic
from echelon.optim import offload_support
from echelon.parallel.tp import cost as tp_cost
from echelon.pipeline.schedules.bubble_time import INTERLEAVED
from echelon.planning.calibrate.programs import COMPILED_LOSSES, PROGRAMS, UNBALANCED_CP
from echelon.planning.cluster.cluster import HOST_DEVICES
from echelon.planning.cluster.link_time import intra_node_latency
from echelon.planning.cost import step_work
from echelon.planning.cost.comm_volume import DpVolume, DpVolumes, dp_volumes, tp_collectives, tp_wire_bytes
from echelon.planning.cost.cp_traffic import computed_attention, cp_traffic
from echelon.planning.cost.elementwise_traffic import elementwise_traffic
from echelon.planning.cost.expert_traffic import expert_traffic
from echelon.planning.cost.memory_model import offloaded_share
from echelon.planning.cost.optimizer_update import optimizer_state_bytes, update_work
from echelon.planning.cost.param_group_traffic import param_groups, weight_traffic
from echelon.planning.cost.recompute_cost import compression_traffic, microbatch_saved_bytes, recompute_shares
from echelon.planning.model.model_shape import COLUMN_PARALLEL, ROUTER, ROW_PARALLEL, LayerShape, MatmulShape
from echelon.planning.scenario import ATTENTION_KERNELS, NUM_MOMENTS, Scenario, lora_numel

GEMM_TILE = 64
"""elements; GEMMs are fast if it divides their dimensions"""
WIDE_HEAD_DIM = 128
"""elements from which a head is wide"""
LOAD_ELEMENTS, UNLOADABLE_COST = 8, 7.0
"""elements of 16 bits that a tensor core's operands are loaded by, and the cost of a GEMM with a dimension that they do
not divide, in that of one off the tile: on an H200 the three GEMMs of a head of 50,257 take 5.7 times as long as of
50,304. Other programs pad their vocabulary"""
LOGIT_TRAFFIC, COMPILED_LOGIT_TRAFFIC, FUSED_LOGIT_TRAFFIC, CUSTOM_LOGIT_TRAFFIC = 8.0, 8 / 3, 2.0, 13.0
"""bytes moved per logit, in forward and for each gradient: by other programs; by a compiled loss, which reads for the
largest, for the sum and in backward, and writes once; by the fused loss kernel, which reads twice and writes once in
all; by a user's loss in float32, whose operators are one kernel each"""


def count_work(scenario: Scenario, *, include_per_step: bool = True) -> step_work.StepWork:
    """Count a step. Without `include_per_step`, leave out what happens once a step: quicker, for a lower bound."""
    return _step_work(scenario, _microbatch_work(scenario), include_per_step)


def count_stacked_work(scenarios: Sequence[Scenario], *, include_per_step: bool = True) -> step_work.StepWork:
    """Count many steps as one stacked `StepWork`; their layouts differ in pp, dp, zero and schedule alone."""
    layout = scenarios[0].layout
    if layout.depth > 1 or layout.recompute.startswith("budget"):  # microbatches then depend on these keys
        return step_work.stack_work([count_work(scenario) for scenario in scenarios])
    microbatch = _microbatch_work(scenarios[0])
    steps = [_step_work(scenario, microbatch, include_per_step) for scenario in scenarios]
    return step_work.stack_work(steps, shared_microbatch=True)


def _microbatch_work(scenario: Scenario) -> step_work.MicrobatchWork:
    shape, tokens, tp = scenario.shape, scenario.tokens, scenario.layout.tp
    dense_gemms, expert_gemms, router_flops = _layer_gemms(scenario)
    vocab = shape.vocab / tp
    flops = 2.0 * tokens * shape.width * vocab
    # A traced module may have no head.
    edge_flops = 2.0 * (shape.width * vocab + tokens * vocab + tokens * shape.width) if flops else 0.0
    # Losses in chunks pad their vocabulary (kernels/layers/cross_entropy.py); slices of one are as tp divides them.
    is_padded = tp == 1 and (scenario.has_kernels or shape.loss is not None)
    sizes = (shape.width,) if is_padded else (shape.width, vocab)
    misaligned = _unloadable_flops(scenario, flops, *sizes)
    return step_work.MicrobatchWork(
        device=_device_rates(scenario),
        program=PROGRAMS.index("plain" if scenario.runs_operators else scenario.program),
        num_layers=shape.num_layers,
        num_moe_layers=shape.num_moe_layers,
        dense_gemms=dense_gemms,
        is_trained=0.0 if scenario.lora_rank else 1.0,
        expert_gemms=expert_gemms,
        router_flops=router_flops,
        is_launched=0.0 if scenario.is_graphed else 1.0,
        head_gemm=step_work.GemmWork(flops=flops, edge_flops=edge_flops, misaligned_flops=misaligned),
        loss_bytes=tokens * vocab * _logit_traffic(scenario),
        attention=_attention_work(scenario),
        elementwise=elementwise_traffic(scenario),
        compression_bytes=compression_traffic(scenario),
        tp=_tp_traffic(scenario),
        ep=expert_traffic(scenario),
        cp=cp_traffic(scenario),
        recompute=recompute_shares(scenario),
    )


def _logit_traffic(scenario: Scenario) -> float:
    """Bytes per logit of the loss and of each gradient."""
    if scenario.runs_operators:
        return CUSTOM_LOGIT_TRAFFIC
    if scenario.has_kernels and scenario.layout.tp == 1:
        return FUSED_LOGIT_TRAFFIC
    return COMPILED_LOGIT_TRAFFIC if scenario.program in COMPILED_LOSSES else LOGIT_TRAFFIC


def _device_rates(scenario: Scenario) -> step_work.DeviceRates:
    cluster, precision = scenario.cluster, scenario.precision
    device = cluster.device
    return step_work.DeviceRates(
        generation=step_work.GENERATIONS.index(device.generation),
        low_precision=step_work.LOW_PRECISION.get(precision, 0) if precision in device.flops else 0,
        peak_flops=device.peak(precision) * device.power_share,
        peak_flops_16bit=device.peak("bf16") * device.power_share,
        memory_bandwidth=device.bandwidth,
        intra_node_bandwidth=cluster.intra_node.bandwidth,
        inter_node_bandwidth=cluster.inter_node.bandwidth,
        latency=intra_node_latency(cluster),
    )


def _layer_gemms(scenario: Scenario) -> tuple[step_work.GemmWork, step_work.GemmWork, float]:
    """Return (dense GEMMs, expert GEMMs, FLOPs of float32 routers) of all layers."""
    dense, experts, router_flops = step_work.GemmWork(), step_work.GemmWork(), 0.0
    for layer, n in scenario.shape.layers:
        for matmul in layer.matmuls:
            if matmul.experts:
                experts = experts.plus(n, _expert_gemm(matmul, scenario))
            elif scenario.has_kernels and matmul.name == ROUTER:
                router_flops += n * float(_dense_gemm(matmul, scenario).flops) / scenario.sp_degree
            else:
                dense = dense.plus(n, _dense_gemm(matmul, scenario))
        if scenario.lora_rank:
            dense = dense.plus(n, _adapter_gemms(layer, scenario))
    return dense, experts, router_flops


def _adapter_gemms(layer: LayerShape, scenario: Scenario) -> step_work.GemmWork:
    """Count the GEMMs of a layer's adapters. They run three times, and the frozen ones beside them twice."""
    flops = 1.5 * 2.0 * scenario.tokens * lora_numel(layer, scenario) / scenario.layout.tp
    return step_work.GemmWork(flops=flops, edge_flops=flops / scenario.lora_rank)


def _expert_gemm(matmul: MatmulShape, scenario: Scenario) -> step_work.GemmWork:
    """Count one GEMM of the experts; each expert receives tokens of all ep ranks."""
    layout = scenario.layout
    k, n = _split_dims(matmul, layout.etp)
    tokens = scenario.expert_load * scenario.tokens * layout.etp / layout.tp
    tokens_per_expert = max(1.0, tokens * matmul.token_share * layout.ep / matmul.experts)
    flops = 2.0 * tokens * matmul.token_share * k * n
    return step_work.GemmWork(flops=flops, edge_flops=flops * (1 / tokens_per_expert + 1 / k + 1 / n))


def _dense_gemm(matmul: MatmulShape, scenario: Scenario) -> step_work.GemmWork:
    layout, tokens = scenario.layout, scenario.tokens
    if matmul.is_gathered:
        tokens *= layout.cp
    if layout.tp_kind == "1d":
        k, n = _split_dims(matmul, layout.tp)
        flops = 2.0 * tokens * k * n
        edge_flops = flops * (1 / tokens + 1 / k + 1 / n)
    else:
        grid = tp_cost.grid_shape(layout)
        token_parts = grid.z if layout.tp_kind == "3d" else grid.batch_parts
        flops = 2.0 * tokens * float(matmul.inputs) * float(matmul.outputs) / layout.tp
        edge_flops = flops * (token_parts / tokens + grid.x / matmul.inputs + grid.x / matmul.outputs)
    sizes = _split_dims(matmul, layout.tp)
    misaligned = flops if any(int(size) % GEMM_TILE for size in sizes) else 0.0
    misaligned = _unloadable_flops(scenario, flops, *sizes) or misaligned
    return step_work.GemmWork(flops=flops, edge_flops=edge_flops, misaligned_flops=misaligned)


def _unloadable_flops(scenario: Scenario, flops: float, *sizes: float) -> float:
    """What a GEMM of Echelon with a size that LOAD_ELEMENTS does not divide counts as, off the tile; else 0."""
    odd = scenario.is_own and scenario.on_gpu and any(int(size) % LOAD_ELEMENTS for size in sizes)
    return flops * UNLOADABLE_COST if odd else 0.0


def _split_dims(matmul: MatmulShape, ranks: int) -> tuple[float, float]:
    inputs = matmul.inputs / ranks if matmul.split == ROW_PARALLEL else float(matmul.inputs)
    outputs = matmul.outputs / ranks if matmul.split == COLUMN_PARALLEL else float(matmul.outputs)
    return inputs, outputs


def _attention_work(scenario: Scenario) -> step_work.AttentionWork:
    tokens, tp, seq_len = scenario.tokens, scenario.layout.tp, scenario.seq_len
    flops = scores = 0.0
    head_dim = 0
    for layer, n in scenario.shape.layers:
        if layer.attention is not None:
            computed = tokens * (scenario.layout.cp if layer.gathered_modules else 1)
            flops += n * computed_attention(scenario, layer.attention).flops(seq_len) * computed / tp
            scores += n * layer.attention.heads / tp * computed * seq_len
            head_dim = max(head_dim, layer.attention.head_dim)
    kernel = scenario.attention_kernel
    if scenario.materializes_scores and kernel == "best":
        kernel = "plain"
    if scenario.program in UNBALANCED_CP:
        flops *= 2 * scenario.layout.cp / (scenario.layout.cp + 1)
    index, wide_heads = ATTENTION_KERNELS.index(kernel), head_dim >= WIDE_HEAD_DIM
    return step_work.AttentionWork(flops=flops, scores=scores, kernel=index, wide_heads=wide_heads)


def _tp_traffic(scenario: Scenario) -> step_work.TpTraffic:
    layout, per_node = scenario.layout, scenario.cluster.per_node
    collectives = tp_collectives(scenario)
    grid = tp_cost.grid_shape(layout)
    return step_work.TpTraffic(
        ranks=layout.tp,
        ring_ranks=max(grid.x, grid.y, grid.z),
        wire_bytes=tp_wire_bytes(collectives, layout),
        overlapped_bytes=tp_wire_bytes([item for item in collectives if item.overlapped], layout),
        num_collectives=sum(item.count for item in collectives),
        in_node=layout.tp <= per_node,
        ranks_per_node=min(layout.tp, per_node),
    )


def _step_work(scenario: Scenario, microbatch: step_work.MicrobatchWork, include_per_step: bool) -> step_work.StepWork:
    offloaded, update = OffloadTraffic(), step_work.UpdateWork()
    if include_per_step:
        num_params = sum(group.shard_numel * n for group, n in param_groups(scenario, 0) if group.trainable)
        if scenario.layout.offload != "none":
            offloaded = _offload_traffic(scenario, num_params)
        update = update_work(scenario, num_params - offloaded.host_updated_params)
    return step_work.StepWork(
        microbatch=microbatch,
        weight_bytes=weight_traffic(scenario),
        pipeline=_pipeline_work(scenario),
        dp=_dp_traffic(scenario, dp_volumes(scenario) if include_per_step else DpVolumes()),
        update=update,
        offload=_offload_work(scenario, offloaded),
    )


def _pipeline_work(scenario: Scenario) -> step_work.PipelineWork:
    layout, shape = scenario.layout, scenario.shape
    pp_span = layout.world if scenario.rank_order[0] == "pp" else layout.tp * layout.cp * layout.pp
    hidden_bytes = scenario.tokens * shape.width * scenario.element_bytes / scenario.sp_degree
    return step_work.PipelineWork(
        pp=layout.pp,
        vpp=layout.vpp,
        num_microbatches=layout.accumulate,
        schedule=step_work.BUBBLE_FORMULAS.get(layout.schedule, INTERLEAVED),
        max_layer_share=scenario.max_layer_share,
        is_even=shape.num_layers % (layout.pp * layout.vpp) == 0,
        p2p_bytes=hidden_bytes if layout.pp > 1 else 0.0,
        in_node=pp_span <= scenario.cluster.per_node,
    )


def _dp_traffic(scenario: Scenario, volumes: DpVolumes) -> step_work.DpTraffic:
    """Lay the groups of dp over nodes: those that shard have neighbours, those of replicas one rank of each of these.

    Ranks of cp are the innermost of dp; experts are sharded by every (ep x etp)-th rank.
    """
    layout, per_node = scenario.layout, scenario.cluster.per_node
    ranks, stages = layout.dp * layout.cp, 1 if scenario.rank_order[0] == "pp" else layout.pp
    inner, expert_inner = layout.tp * stages, layout.ep * layout.etp * stages
    return step_work.DpTraffic(
        ranks=ranks,
        in_node=inner * ranks <= per_node,
        ranks_per_node=max(1.0, min(per_node / inner, ranks)),
        shards=_group_traffic(volumes.shards, inner, per_node),
        replicas=_group_traffic(volumes.replicas, inner * volumes.shards.ranks, per_node),
        expert_shards=_group_traffic(volumes.expert_shards, expert_inner, per_node),
        expert_replicas=_group_traffic(volumes.expert_replicas, expert_inner * volumes.expert_shards.ranks, per_node),
        every_microbatch=scenario.sharding_policy.reduce_scatter_every_microbatch,
        regathers=scenario.sharding_policy.reshards_params,
    )


def _group_traffic(volume: DpVolume, inner: int, per_node: int) -> step_work.GroupTraffic:
    """Lay a group over nodes whose ranks are `inner` apart."""
    return step_work.GroupTraffic(
        ranks=volume.ranks,
        ranks_per_node=max(1.0, min(per_node / inner, volume.ranks)),
        in_node=inner * volume.ranks <= per_node,
        gather_bytes=volume.gathered,
        reduce_bytes=volume.reduced,
        num_collectives=volume.num_collectives,
    )


def _offload_traffic(scenario: Scenario, num_params: float) -> OffloadTraffic:
    layout, rule = scenario.layout, scenario.optimizer
    state_bytes: float = NUM_MOMENTS * scenario.moment_bytes
    if rule is not None:
        state_bytes = optimizer_state_bytes(scenario, rule, 0) / max(1.0, num_params)
    return offload_traffic(
        layout.offload,
        shard_params=num_params,
        activation_bytes=microbatch_saved_bytes(scenario) / layout.pp,
        accumulate=layout.accumulate,
        compute_bytes=scenario.element_bytes,
        gradient_bytes=scenario.gradient_bytes,
        state_bytes=4 + state_bytes,
        offloaded_share=offloaded_share(scenario),
        updates_on_device=rule is not None and offload_support.updates_on_device(rule),
        early_gradients=not scenario.sharding_policy.accumulates_grads,
    )


def _offload_work(scenario: Scenario, traffic: OffloadTraffic) -> step_work.OffloadWork:
    cluster, offload = scenario.cluster, scenario.layout.offload
    measured = cluster.curves.host if cluster.curves else 0.0
    ranks_per_host = min(cluster.per_node, HOST_DEVICES)
    param_seconds = offload_cost.host_update_seconds(
        scenario.moment_bytes,
        scenario.optimizer.states if scenario.optimizer is not None else "float32",
        gradient_on_host=not scenario.sharding_policy.accumulates_grads or offload_cost.offloads_params(offload),
    )
    return step_work.OffloadWork(
        host_bandwidth=measured or cluster.device.host_link.bandwidth,
        link_bytes=traffic.link_bytes,
        page_bytes=traffic.page_bytes,
        num_params=traffic.host_updated_params,
        params_per_second=1 / param_seconds / ranks_per_host,
        disk_seconds=traffic.disk_bytes / (cluster.disk_bandwidth / ranks_per_host),
    )
