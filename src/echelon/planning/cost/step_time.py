"""Seconds of a step by cause, from what it does (work.py) and what programs reach (constants.py).

[Note: a step]

    step = accumulate x (the fullest rank's microbatch) + bubble + what of the messages is not hidden + update

A product of m x k by k x n takes its FLOPs over what the device reaches, and is longer by partly filled tiles at the
edges: FLOPs (1 + e/m + e/k + e/n). Operators between products move bytes. Kernels take time to start. A group's
messages between nodes use the links of all its ranks in a node, up to the speed inside it.

[Note: waiting]

With f, i and w the seconds of a rank's forward and of both halves of its backward in one microbatch, of d ranks, m
microbatches and v chunks, a step is longer than m (f + i + w) by

    1f1b          (d - 1) (f + i + w) / v, and where m < d the holes that are left, (d - m) (v - 1) / v more of them
    zb-h1         (d - 1) (f + i) - min(d - 1, m - 1) w: weights' gradients fill it, where there are enough of them
    zb-v          (d - 1) max(f / 2, i - w), but at least the way there and back: (d - 1) (f + i) - (m - 1) f
    dualpipe-v    the same, the way there and back (d - 1) w / 2 longer

as simulating them says (price.py does so with those that are chosen).

Numbers may be arrays: every line prices one layout or thousands.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.cluster.link_time import exposed_time
from echelon.planning.cost.cp_time import cp_time, link_bandwidths
from echelon.planning.cost.work import AMPERE, CPU, HOPPER, VOLTA, StepWork

ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZB_V, DUALPIPE_V = range(5)
PLAIN_ATTENTION, FUSED_SOFTMAX, FLASH1, FLASH2, BEST_ATTENTION = range(5)
NARROW_HEAD_SPEED = 0.8
"""speed of attention with heads of fewer than WIDE_HEAD elements, to others"""
GEMM_BACKWARD_RATIO = 2.0
"""products of backward, to those of forward"""
FLASH_BACKWARD_RATIO = 2.5
UNFUSED_BACKWARD_RATIO = 2.0
ROUTER_PEAK_SHARE = 0.042
"""share of the 16-bit peak that routers reach in 32 bits: those of 2,048 by 128 on an H200, where ours were measured"""


@dataclass(frozen=True, kw_only=True)
class MicrobatchTime:
    """Seconds of one microbatch through all layers and the head, by cause. Forward and backward apart."""

    gemms: Any
    expert_gemms: Any
    attention: Any
    elementwise: Any
    """operators between products"""
    elementwise_backward_ratio: Any
    """what they take in backward, to forward"""
    weight_traffic: Any
    """weights and their gradients on their way, beside products, and what is kept in another form: as of backward"""
    kernel_launches: Any
    """the host's time to start the kernels of forward, and of backward: it runs beside the device"""
    head: Any
    """forward"""
    tp: Any
    """of the whole microbatch, recomputation included; what is not hidden"""
    ep: Any
    cp: Any
    """what merges results too (reaching.py)"""
    pp: Any
    """one message"""
    uses_flash: Any

    @property
    def _forward_device(self) -> Any:
        return self.gemms + self.expert_gemms + self.attention + self.elementwise

    @property
    def _backward_device(self) -> Any:
        attention = np.where(self.uses_flash, FLASH_BACKWARD_RATIO, UNFUSED_BACKWARD_RATIO) * self.attention
        return (
            GEMM_BACKWARD_RATIO * self.weight_grad
            + attention
            + self.elementwise_backward_ratio * self.elementwise
            + self.weight_traffic
        )

    @property
    def launch_waits(self) -> tuple[Any, Any]:
        """Of the device for the host, in forward and in backward."""
        return tuple(
            exposed_time(self.kernel_launches, device) for device in (self._forward_device, self._backward_device)
        )

    @property
    def forward(self) -> Any:
        return self._forward_device + self.launch_waits[0]

    @property
    def weight_grad(self) -> Any:
        """The part of backward that makes gradients of weights."""
        return self.gemms + self.expert_gemms

    @property
    def backward(self) -> Any:
        return self._backward_device + self.launch_waits[1]


def microbatch_time(work: StepWork, c: Constants = FITTED_CONSTANTS) -> MicrobatchTime:
    old = work.generation < HOPPER
    reached16 = np.select(
        [work.generation == CPU, work.generation == VOLTA, work.generation == AMPERE, work.generation == HOPPER],
        [c.cpu, c.volta, c.ampere, c.hopper],
        c.blackwell,
    )
    narrow = np.where(work.narrow == 1, np.where(work.generation == HOPPER, c.hopper_fp8, c.blackwell_fp8), c.fp4)
    rate16 = work.peak16 * reached16
    rate = np.where(work.narrow > 0, work.peak * narrow, work.peak * reached16)
    edge = c.edge * work.peak / work.peak16
    stream = work.memory * c.streaming
    flash = work.kernel >= FLASH1
    reached = np.select(
        [work.kernel == FLASH1, work.kernel == FLASH2],
        [c.flash1, np.where(work.generation >= HOPPER, c.flash2_hopper, c.flash2)],
        c.best_attention,
    ) * np.where(work.wide_heads > 0, 1.0, NARROW_HEAD_SPEED)
    written = np.where(work.kernel == PLAIN_ATTENTION, c.plain_scores, c.scores) * work.scores / stream
    attention = np.where(
        flash, work.attention_flops / (work.peak16 * reached), 2 * work.attention_flops / rate16 + written
    )
    attention = attention * np.where(work.by_blocks > 0, c.blocks, 1.0)
    norms = work.norms * np.where(work.fused_norms > 0, 1.0, c.loose_norms)
    casts = np.where(work.narrow > 0, c.casts, 0.0) * (work.norms + work.passed) / 2
    inside, outside = link_bandwidths(work, c)
    across = np.minimum(inside, outside * work.tp_members)
    tp_link = np.where(work.tp_near > 0, inside, across)
    tp = (work.tp_bytes - work.tp_hidden) / tp_link + work.latency * work.tp_messages
    products = (work.flops + c.odd * work.odd_flops + edge * work.edges) / rate
    products += work.router_flops / (work.peak16 * ROUTER_PEAK_SHARE)
    ep = work.ep_inside / inside + work.ep_outside / outside + work.latency * work.ep_messages
    return MicrobatchTime(
        gemms=products,
        expert_gemms=(work.expert_flops + c.expert_edge * work.expert_edges) / rate,
        attention=attention,
        elementwise=(2 * (norms + work.passed) + casts) / stream,
        elementwise_backward_ratio=work.passed_backward,
        weight_traffic=(work.weight_bytes + work.packed) / stream,
        kernel_launches=c.launch * work.layers + c.launch_experts * work.mixtures,
        head=(work.head_flops + c.edge * work.head_edges) / rate16 + work.loss_bytes / work.memory,
        tp=np.where(work.tp > 1, tp, 0.0) * np.where(old, 1.0, c.tp_shown)
        + exposed_time(work.tp_hidden / tp_link, (1 + GEMM_BACKWARD_RATIO) * products),
        ep=ep * c.ep_shown,
        cp=cp_time(work, c, attention, np.where(flash, FLASH_BACKWARD_RATIO, UNFUSED_BACKWARD_RATIO) * attention).total,
        pp=np.where(work.pp > 1, work.pp_bytes / np.where(work.pp_near > 0, inside, outside) + work.latency, 0.0),
        uses_flash=flash,
    )


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of a step by cause; they sum to `total`."""

    products: Any
    attention: Any
    passing: Any
    launches: Any
    head: Any
    recompute: Any
    tp: Any
    ep: Any
    cp: Any
    pp: Any
    imbalance: Any
    """waiting for the fullest stage"""
    bubble: Any
    dp: Any
    """what is not hidden"""
    update: Any
    offload: Any
    """messages to the host that nothing hides, its update, and the disk"""
    rest: Any

    @property
    def total(self) -> Any:
        return sum(getattr(self, field.name) for field in fields(self))


def recompute_time(work: StepWork, m: MicrobatchTime) -> Any:
    """Seconds of a microbatch's recomputation."""
    some = work.repeated_attention * m.attention + work.repeated_passing * m.elementwise
    return work.repeated * m.forward + some + work.repeated_experts * m.expert_gemms


def step_times(work: StepWork, c: Constants = FITTED_CONSTANTS) -> StepTimes:
    """Of a step, the pipeline by its formula. `price.py` simulates the real schedule instead."""
    m = microbatch_time(work, c)
    again = recompute_time(work, m)
    layers = m.forward + m.backward + again + m.tp + m.ep + m.cp
    head = 3 * m.head
    fullest = np.where(
        work.pp > 1,
        np.where(
            work.even > 0, layers * work.slowest + head, np.maximum(layers * work.slowest, (layers + head) / work.pp)
        ),
        layers + head,
    )
    mean = layers / work.pp
    count, stages = work.accumulate, work.pp
    bubble = _bubble_time(work, m, mean)
    sends = count * 2 * work.vpp * m.pp * c.pp_shown + 2 * (stages - 1) * m.pp
    busy = count * fullest + bubble + sends
    dp = _exposed_dp_time(work, c, busy, m.backward / stages)
    share = count / stages
    ends = np.where(stages > 1, np.where(work.even > 0, head, head / stages), head) * count
    parts = {
        "products": 3 * (m.gemms + m.expert_gemms) * share,
        "attention": (1 + np.where(m.uses_flash, FLASH_BACKWARD_RATIO, UNFUSED_BACKWARD_RATIO)) * m.attention * share,
        "passing": ((1 + m.elementwise_backward_ratio) * m.elementwise + m.weight_traffic) * share,
        "launches": sum(m.launch_waits) * share,
        "head": ends,
        "recompute": again * share,
        "tp": m.tp * share,
        "ep": m.ep * share,
        "cp": m.cp * share,
    }
    return StepTimes(
        **parts,
        pp=sends,
        imbalance=count * fullest - sum(parts.values()),
        bubble=bubble,
        dp=dp,
        update=np.where(
            work.update_bytes > 0,
            work.update_bytes / (work.memory * c.streaming),
            c.update * work.updated / work.memory,
        )
        + _update_comm_time(work, c),
        offload=_offload_time(work, busy),
        rest=c.step * np.where(work.dp * work.tp * work.pp > 1, 1.0, c.alone),
    )


def _update_comm_time(work: StepWork, c: Constants) -> Any:
    """Seconds of an update's products and messages, which nothing hides: products of bfloat16 on whole matrices."""
    inside, outside = link_bandwidths(work, c)
    link = np.where(work.update_near > 0, inside, np.minimum(inside, outside * work.dp_members))
    return work.update_flops / (work.peak16 * c.ampere) + work.update_sent / link + work.latency * work.update_messages


def _bubble_time(work: StepWork, m: MicrobatchTime, mean: Any) -> Any:
    forward = (m.forward + (m.tp + m.ep + m.cp) / (2 + work.repeated)) / work.pp
    found = bubble_times(work.pp, work.accumulate, work.vpp, forward, mean, m.weight_grad / work.pp)
    kinds = [work.schedule <= INTERLEAVED, work.schedule == ZB_H1, work.schedule == ZB_V, work.schedule == DUALPIPE_V]
    return np.select(kinds, found, 0.0)


def bubble_times(pp: Any, accumulate: Any, vpp: Any, forward: Any, microbatch: Any, weight_grad: Any) -> list[Any]:
    """Seconds that a rank waits in a step under 1f1b, zb-h1, zb-v and dualpipe-v. See [Note: waiting].

    Of one microbatch on a rank: its forward, all of it, and the half of its backward that is for weights.
    """
    behind, others, inputs = pp - 1, accumulate - 1, microbatch - forward - weight_grad
    holes = np.maximum(pp - accumulate, 0) * (vpp - 1)
    there_and_back = behind * (forward + inputs) - others * forward
    least = behind * np.maximum(forward / 2, inputs - weight_grad)
    return [
        (behind + holes) / vpp * microbatch,
        behind * (forward + inputs) - np.minimum(behind, others) * weight_grad,
        np.maximum(least, there_and_back),
        np.maximum(least, there_and_back + behind * weight_grad / 2),
    ]


def _offload_time(work: StepWork, busy: Any) -> Any:
    moving = np.where(work.host_bytes > 0, exposed_time(work.host_bytes / work.host, busy), 0.0)
    return moving + work.host_updated / work.host_updates + work.disk_seconds


def _exposed_dp_time(work: StepWork, c: Constants, busy: Any, backward: Any) -> Any:
    """What of the messages of parameters and gradients compute does not hide."""
    inside, outside = link_bandwidths(work, c)
    speed = np.where(work.dp_near > 0, inside, np.minimum(inside, outside * work.dp_members))
    sending = work.dp_bytes / speed
    hidden = np.where(
        work.streams > 0, c.stream_hidden * busy, np.where(work.generation < HOPPER, 0.0, c.dp_hidden * backward)
    )
    return exposed_time(sending, hidden) + np.where(work.streams > 0, c.stream_shown * sending, 0.0)
