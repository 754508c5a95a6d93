"""Seconds of a step by cause: its work (step_work.py) over what programs reach of a device (constants.py).

[Note: a step]

    step = microbatches x (the slowest rank's microbatch) + bubble + exposed communication + update

The search takes the bubble from a formula (pipeline/schedules/bubble_time.py); priced_plan.py simulates the schedules
of the layouts that it chooses.

A GEMM of m x k by k x n takes its FLOPs over the rate that the device reaches, and longer for partly filled tiles at
its edges: FLOPs (1 + e/m + e/k + e/n). Operators between GEMMs move bytes. The host takes time to launch kernels. A
group whose ranks span nodes uses the links of all its ranks in a node, up to the bandwidth inside it.

Every number may be an array: each line times one layout or thousands.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from echelon.pipeline.schedules.bubble_time import bubble_times
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.calibrate.programs import ProgramProfile
from echelon.planning.cluster.link_time import exposed_time
from echelon.planning.cost.cp_time import cp_time
from echelon.planning.cost.reached_rates import ReachedRates, reached_rates
from echelon.planning.cost.step_work import (
    BLACKWELL,
    HOPPER,
    NPU,
    GemmWork,
    GroupTraffic,
    MicrobatchWork,
    Number,
    StepWork,
)

PLAIN_ATTENTION, _, FLASH1, FLASH2 = range(4)
"""indices into ATTENTION_KERNELS"""
NARROW_HEAD_SPEED = 0.8
"""speed of attention with heads below WIDE_HEAD_DIM elements, over that with wider ones"""
OLD_MMA_SPEED = 0.62
"""of the peak of Hopper's tensor cores, what Ampere's instructions reach, of which flash attention 2 consists (Luo et
al. 2024)"""
TP_OVERLAP = (HOPPER, BLACKWELL, NPU)
"""generations whose libraries overlap tensor parallelism with GEMMs"""
GEMM_BACKWARD_RATIO = 2.0
FLASH_BACKWARD_RATIO = 2.5
UNFUSED_BACKWARD_RATIO = 2.0
ROUTER_PEAK_SHARE = 0.042
"""of the 16-bit peak that a router reaches in float32: measured for 2,048 by 128 on an H200"""


@dataclass(frozen=True, kw_only=True)
class MicrobatchTime:
    """Seconds of one microbatch through all layers and the head, by cause; of forward unless stated otherwise."""

    gemms: Number
    expert_gemms: Number
    is_trained: Number
    """0 where weights are frozen, and have no gradients"""
    attention: Number
    attention_backward_ratio: Number
    elementwise: Number
    """operators between GEMMs"""
    elementwise_backward_ratio: Number
    weight_traffic: Number
    """casts and accumulation of weights' gradients, compression of activations; counted as backward"""
    kernel_launches: Number
    """of the host, for forward and again for backward; the device works meanwhile"""
    head: Number
    tp: Number
    """exposed, of forward, backward and recomputation"""
    ep: Number
    cp: Number
    """merging of results included"""
    pp: Number
    """one transfer"""

    @property
    def forward_device(self) -> Number:
        return self.gemms + self.expert_gemms + self.attention + self.elementwise

    @property
    def backward_device(self) -> Number:
        attention = self.attention_backward_ratio * self.attention
        elementwise = self.elementwise_backward_ratio * self.elementwise
        input_grad = (GEMM_BACKWARD_RATIO - 1) * (self.gemms + self.expert_gemms)
        return input_grad + self.weight_grad + attention + elementwise + self.weight_traffic

    @property
    def launch_waits(self) -> tuple[Number, Number]:
        """Seconds that the device waits for the host, in forward and in backward, which it launches during the head."""
        launches = self.kernel_launches
        in_backward = self.backward_device + self.all_head
        return exposed_time(launches, self.forward_device), exposed_time(launches, in_backward)

    @property
    def all_head(self) -> Number:
        """The head's forward and backward."""
        return (GEMM_BACKWARD_RATIO + self.is_trained) * self.head

    @property
    def forward(self) -> Number:
        return self.forward_device + self.launch_waits[0]

    @property
    def weight_grad(self) -> Number:
        """Part of backward."""
        return self.is_trained * (self.gemms + self.expert_gemms)

    @property
    def backward(self) -> Number:
        return self.backward_device + self.launch_waits[1]

    @property
    def communication(self) -> Number:
        return self.tp + self.ep + self.cp


def microbatch_time(work: StepWork, c: Constants = FITTED_CONSTANTS) -> MicrobatchTime:
    """Time one microbatch of a step."""
    m, device = work.microbatch, work.microbatch.device
    profile = program_profile(m.program, c)
    rates = reached_rates(device, c, profile)
    gemms = _gemm_time(m.dense_gemms, rates.gemm_edge, rates.gemm_flops, c)
    gemms += m.router_flops / (device.peak_flops_16bit * ROUTER_PEAK_SHARE)
    attention = _attention_time(m, rates, c, profile)
    attention_backward = np.where(m.attention.kernel >= FLASH1, FLASH_BACKWARD_RATIO, UNFUSED_BACKWARD_RATIO)
    expert_gemms = _gemm_time(m.expert_gemms, c.expert_edge, rates.gemm_flops, c)
    computes = (1 + GEMM_BACKWARD_RATIO) * (gemms + expert_gemms) + (1 + attention_backward) * attention
    head = _gemm_time(m.head_gemm, c.edge, rates.gemm_flops_16bit, c)
    return MicrobatchTime(
        gemms=gemms,
        expert_gemms=expert_gemms,
        is_trained=m.is_trained,
        attention=attention,
        attention_backward_ratio=attention_backward,
        elementwise=_elementwise_time(m, rates, c) * profile.traffic,
        elementwise_backward_ratio=m.elementwise.backward_ratio,
        weight_traffic=(work.weight_bytes + m.compression_bytes) / rates.memory_bandwidth,
        kernel_launches=(c.launch * profile.host * m.num_layers + c.launch_experts * m.num_moe_layers) * m.is_launched,
        head=head + m.loss_bytes / device.memory_bandwidth,
        tp=_exposed_tp_time(m, rates, profile, gemms),
        ep=_exposed_ep_time(work, rates, c, computes),
        cp=cp_time(m, rates, attention, attention_backward * attention).total,
        pp=_p2p_time(work, rates),
    )


def program_profile(program: Number, c: Constants) -> ProgramProfile:
    """The profile of a program by its index; of stacked steps, an array for each of its numbers."""
    if np.ndim(program) == 0:
        return c.profiles[int(program)]
    index = np.asarray(program, dtype=np.intp)
    names = [field.name for field in fields(ProgramProfile)]
    columns: dict[str, Any] = {name: np.array([getattr(one, name) for one in c.profiles])[index] for name in names}
    return ProgramProfile(**columns)


def _gemm_time(work: GemmWork, edge: Number, flops_per_second: Number, c: Constants) -> Number:
    return (work.flops + c.misaligned_gemms * work.misaligned_flops + edge * work.edge_flops) / flops_per_second


def _attention_time(work: MicrobatchWork, rates: ReachedRates, c: Constants, profile: ProgramProfile) -> Number:
    """Time forward attention: flash kernels by their FLOPs, others by their GEMMs and the scores that they write."""
    attention, device = work.attention, work.device
    flash_share = np.select(
        [attention.kernel == FLASH1, attention.kernel == FLASH2],
        [c.flash1, c.flash2 * np.where(np.isin(device.generation, (HOPPER, BLACKWELL)), OLD_MMA_SPEED, 1.0)],
        np.where(device.generation == BLACKWELL, c.blackwell_attention, c.best_attention),
    ) * np.where(attention.wide_heads > 0, 1.0, NARROW_HEAD_SPEED)
    per_score = np.where(attention.kernel == PLAIN_ATTENTION, c.plain_score_bytes, c.fused_score_bytes)
    flash = attention.flops / (device.peak_flops_16bit * flash_share * profile.speed)
    unfused = 2 * attention.flops / rates.gemm_flops_16bit + per_score * attention.scores / rates.memory_bandwidth
    seconds = np.where(attention.kernel >= FLASH1, flash, unfused)
    return seconds * np.where(work.cp.is_blockwise > 0, c.blockwise_attention, 1.0)


def _elementwise_time(work: MicrobatchWork, rates: ReachedRates, c: Constants) -> Number:
    traffic = work.elementwise
    norms = traffic.norms * np.where(traffic.fused_norms > 0, 1.0, c.unfused_norms)
    cast_bytes = np.where(work.device.low_precision > 0, c.cast_bytes, 0.0) * traffic.cast
    return (2 * (norms + traffic.other) + cast_bytes) / rates.memory_bandwidth


def _exposed_tp_time(work: MicrobatchWork, rates: ReachedRates, profile: ProgramProfile, gemms: Number) -> Number:
    tp, nodes = work.tp, work.tp.ranks / work.tp.ranks_per_node
    bandwidth = rates.group_bandwidth(tp.in_node, tp.ranks_per_node, nodes)
    latency = rates.group_latency(np.minimum(tp.ring_ranks, tp.ranks_per_node), tp.ring_ranks / tp.ranks_per_node)
    seconds = np.where(tp.ranks > 1, tp.wire_bytes / bandwidth + latency * tp.num_collectives, 0.0)
    beside = seconds * tp.overlapped_bytes / np.maximum(tp.wire_bytes, 1.0)
    exposed_share = np.where(np.isin(work.device.generation, TP_OVERLAP), 1 - profile.tp_overlap, 1.0)
    overlapped: Number = exposed_time(beside, rates.hides_communication * (1 + GEMM_BACKWARD_RATIO) * gemms)
    return (seconds - beside) * exposed_share + overlapped


def _exposed_ep_time(work: StepWork, rates: ReachedRates, c: Constants, computes: Number) -> Number:
    """Time the all-to-alls of experts that compute does not hide.

    Where microbatches run in pairs, one computes while tokens of the other are on their way, and is slowed by it. The
    first forwards of a step and the last backwards have no other beside them: as many as stages, whatever their chunks.
    """
    ep, pipeline = work.microbatch.ep, work.pipeline
    seconds = rates.all_to_all_time(ep)
    alone = seconds * c.ep_exposed
    beside = exposed_time(seconds, rates.hides_communication * computes) + c.contention * np.minimum(seconds, computes)
    in_pairs = np.where(ep.pairs_microbatches > 0, 1 - np.minimum(1, pipeline.pp / pipeline.num_microbatches), 0.0)
    exposed: Number = alone - in_pairs * np.maximum(0.0, alone - beside)
    return exposed


def _p2p_time(work: StepWork, rates: ReachedRates) -> Number:
    pipeline = work.pipeline
    link = np.where(pipeline.in_node > 0, rates.intra_node_bandwidth, rates.inter_node_bandwidth)
    return np.where(pipeline.pp > 1, pipeline.p2p_bytes / link + rates.latency, 0.0)


def recompute_time(work: StepWork, m: MicrobatchTime) -> Number:
    """Seconds of a microbatch's recomputation."""
    shares = work.microbatch.recompute
    besides = shares.attention * m.attention + shares.elementwise * m.elementwise
    besides += shares.gemms * (m.gemms + m.expert_gemms)
    return shares.layers * m.forward + besides + shares.experts * m.expert_gemms


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of a step by cause; they sum to `total`. The names are the keys of `echelon plan --json`."""

    products: Number
    """GEMMs"""
    attention: Number
    passing: Number
    """operators between GEMMs"""
    launches: Number
    head: Number
    recompute: Number
    tp: Number
    ep: Number
    cp: Number
    pp: Number
    imbalance: Number
    """waiting for the slowest stage"""
    bubble: Number
    dp: Number
    update: Number
    offload: Number
    """exposed transfers to the host, its update, the disk"""
    rest: Number

    @property
    def total(self) -> Number:
        causes: list[Number] = [getattr(self, field.name) for field in fields(self)]
        return sum(causes)


def step_times(work: StepWork, c: Constants = FITTED_CONSTANTS) -> StepTimes:
    """Time a step, its bubble by formula. See [Note: a step]."""
    m, pipeline = microbatch_time(work, c), work.pipeline
    pp, num_microbatches = pipeline.pp, pipeline.num_microbatches
    recompute = recompute_time(work, m)
    layers = m.forward + m.backward + recompute + m.tp + m.ep + m.cp
    slowest = _slowest_rank_time(work, layers, m.all_head)
    bubble = _bubble_time(work, m, layers / pp)
    p2p = num_microbatches * 2 * pipeline.vpp * m.pp * c.pp_exposed + 2 * (pp - 1) * m.pp
    busy = num_microbatches * slowest + bubble + p2p
    share = num_microbatches / pp
    causes = {
        "products": (GEMM_BACKWARD_RATIO + m.is_trained) * (m.gemms + m.expert_gemms) * share,
        "attention": (1 + m.attention_backward_ratio) * m.attention * share,
        "passing": ((1 + m.elementwise_backward_ratio) * m.elementwise + m.weight_traffic) * share,
        "launches": sum(m.launch_waits) * share,
        "head": _head_time(work, m.all_head) * num_microbatches,
        "recompute": recompute * share,
        "tp": m.tp * share,
        "ep": m.ep * share,
        "cp": m.cp * share,
    }
    return StepTimes(
        **causes,
        pp=p2p,
        imbalance=num_microbatches * slowest - sum(causes.values()),
        bubble=bubble,
        dp=_exposed_dp_time(work, c, busy),
        update=_update_time(work, c),
        offload=_offload_time(work, busy, _update_time(work, c)),
        rest=c.step_overhead * np.where(work.dp.ranks * work.microbatch.tp.ranks * pp > 1, 1.0, c.single_device_share),
    )


def _slowest_rank_time(work: StepWork, layers: Number, head: Number) -> Number:
    """Seconds of one microbatch on the slowest rank; uneven stages have fewer layers where the head is."""
    pipeline, share = work.pipeline, work.pipeline.max_layer_share
    even = layers * share + head
    uneven = np.maximum(layers * share, (layers + head) / pipeline.pp)
    return np.where(pipeline.pp > 1, np.where(pipeline.is_even > 0, even, uneven), layers + head)


def _head_time(work: StepWork, head: Number) -> Number:
    """Seconds by which the head makes a microbatch longer."""
    pipeline = work.pipeline
    return np.where(pipeline.pp > 1, np.where(pipeline.is_even > 0, head, head / pipeline.pp), head)


def _bubble_time(work: StepWork, m: MicrobatchTime, microbatch: Number) -> Number:
    pipeline, schedule = work.pipeline, work.pipeline.schedule
    forward = (m.forward + m.communication / (2 + work.microbatch.recompute.layers)) / pipeline.pp
    sizes = (pipeline.pp, pipeline.num_microbatches, pipeline.vpp)
    bubbles: list[Number] = bubble_times(*sizes, forward, microbatch, m.weight_grad / pipeline.pp)
    return np.select([schedule == index for index in range(len(bubbles))], bubbles, 0.0)


def dp_overlap_time(work: StepWork, c: Constants, busy: Number) -> Number:
    """Time of compute that overlaps gathers of parameters and reductions of gradients."""
    profile, m = program_profile(work.microbatch.program, c), microbatch_time(work, c)
    once_a_step = profile.overlap * (m.forward + m.backward) * _last_passes(work)
    hides = reached_rates(work.microbatch.device, c, profile).hides_communication
    return hides * np.where(work.dp.every_microbatch > 0, busy, once_a_step)


def _last_passes(work: StepWork) -> Number:
    """Microbatches, through all layers, that a rank still passes when its first gradients are complete.

    Interleaved stages take pp microbatches a chunk: while the last ones pass the other chunks, the first is reduced.
    """
    pipeline = work.pipeline
    in_turn = np.where(pipeline.vpp > 1, np.minimum(pipeline.pp, pipeline.num_microbatches), 1)
    return in_turn / pipeline.pp


def _exposed_dp_time(work: StepWork, c: Constants, busy: Number) -> Number:
    """Time gathers of parameters and reductions of gradients that compute does not hide.

    Once a step, backward of the last microbatch hides the reduction, and forward of the first one the gather. FSDP
    gathers a layer ahead: forward hides the gathers of all layers but the first, backward those of all but the last
    and the reductions. What is hidden slows the compute beside it: both use the device's memory and processors.
    """
    dp, device, layers = work.dp, work.microbatch.device, work.microbatch.num_layers
    profile, m = program_profile(work.microbatch.program, c), microbatch_time(work, c)
    rates = reached_rates(device, c, profile)
    sharded = [_group_times(group, rates) for group in (dp.shards, dp.expert_shards)]
    replicated = [_group_times(group, rates, reduces_all=True) for group in (dp.replicas, dp.expert_replicas)]
    gather, reduce = (sum(times) for times in zip(*sharded, strict=True))
    all_reduce = sum(seconds for _, seconds in replicated)
    total, hides = gather + reduce, rates.hides_communication
    forward, backward = (hides * profile.overlap * each * _last_passes(work) for each in (m.forward, m.backward))
    once = exposed_time(gather, forward) + exposed_time(reduce + all_reduce, backward)
    early = np.where(dp.regathers > 0, gather / 2, gather)
    forward_share = m.forward / (m.forward + m.backward)
    hidden_early, hidden_late = hides * forward_share * busy, hides * (1 - forward_share) * busy
    every = exposed_time(early, hidden_early) + exposed_time(total - early, hidden_late)
    every += hides * (total * work.pipeline.pp / np.maximum(layers, 1) + c.contention * np.minimum(total, busy))
    every += exposed_time(all_reduce, backward)
    exposed: Number = np.where(dp.every_microbatch > 0, every, once)
    return exposed


def _group_times(group: GroupTraffic, rates: ReachedRates, *, reduces_all: bool = False) -> tuple[Number, Number]:
    """Seconds of a group's gathers and of its reductions."""
    nodes = group.ranks / group.ranks_per_node
    latency = rates.group_latency(group.ranks_per_node, nodes, reduces_all=reduces_all) * group.num_collectives
    bandwidth = rates.group_bandwidth(group.in_node, group.ranks_per_node, nodes)
    seconds = np.where(group.ranks > 1, group.wire_bytes / bandwidth + latency, 0.0)
    gather: Number = group.gather_bytes / np.maximum(group.wire_bytes, 1.0) * seconds
    return gather, seconds - gather


def _update_time(work: StepWork, c: Constants) -> Number:
    """Time the update: its memory traffic, Muon's GEMMs in bfloat16 on full matrices, its collectives."""
    update, dp, device = work.update, work.dp, work.microbatch.device
    rates = reached_rates(device, c)
    assumed = c.update_bytes * update.num_params / device.memory_bandwidth
    memory = np.where(update.memory_bytes > 0, update.memory_bytes / rates.memory_bandwidth, assumed)
    gemms = update.flops / (device.peak_flops_16bit * c.ampere)
    nodes = dp.ranks / dp.ranks_per_node
    transfers = update.wire_bytes / rates.group_bandwidth(dp.in_node, dp.ranks_per_node, nodes)
    return memory + (gemms + transfers + rates.latency * update.num_collectives)


def _offload_time(work: StepWork, busy: Number, update: Number) -> Number:
    """Time the transfers that compute does not hide; pages of states are hidden by the update alone."""
    offload = work.offload
    pages = np.maximum(0.0, offload.page_bytes / offload.host_bandwidth - update)
    exposed = exposed_time(offload.link_bytes / offload.host_bandwidth, busy)
    transfers = np.where(offload.link_bytes > 0, exposed, 0.0)
    return transfers + pages + offload.num_params / offload.params_per_second + offload.disk_seconds
