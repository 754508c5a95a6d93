"""`StepWork`: what one rank computes, moves and sends in one training step, before any of it is timed.

count_work.py fills these records from the model's shape, the layout and the cost functions of the strategies;
step_time.py divides them by what devices reach. Every number may be an array: `stack_work` makes one `StepWork` of
many, so that thousands of layouts are timed as quickly as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.pipeline.schedules.bubble_time import DUALPIPE_V, NO_BUBBLE, ZB_H1, ZB_V

Number: TypeAlias = float | NDArray[Any]
"""a number, or an array with one for each stacked step"""
GENERATIONS = ("cpu", "volta", "ampere", "hopper", "blackwell", "amd", "tpu", "npu")
CPU, VOLTA, AMPERE, HOPPER, BLACKWELL, AMD, TPU, NPU = range(len(GENERATIONS))
BUBBLE_FORMULAS = {"zb-h1": ZB_H1, "zb-v": ZB_V, "dualpipe-v": DUALPIPE_V, **dict.fromkeys(ASYNC_SCHEDULES, NO_BUBBLE)}
"""schedules with a bubble formula of their own; others are timed as 1f1b"""
LOW_PRECISION = {"fp8": 1, "fp4": 2}
"""GEMM dtypes below 16 bits; all others are 0"""


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Peak rates of the device and its links, as the vendor states them; FLOPs at the clock that its power sustains."""

    generation: Number
    """index into GENERATIONS"""
    low_precision: Number
    """value of LOW_PRECISION"""
    peak_flops: Number
    """per second, in the dtype of the GEMMs"""
    peak_flops_16bit: Number
    memory_bandwidth: Number
    """bytes per second"""
    intra_node_bandwidth: Number
    """bytes per second and device"""
    inter_node_bandwidth: Number
    latency: Number
    """seconds of one collective"""


@dataclass(frozen=True, kw_only=True)
class GemmWork:
    """FLOPs of forward GEMMs."""

    flops: Number = 0.0
    edge_flops: Number = 0.0
    """sum of FLOPs x (1/m + 1/k + 1/n): what partly filled tiles cost"""
    misaligned_flops: Number = 0.0
    """of GEMMs with a dimension that GEMM_TILE does not divide"""

    def plus(self, times: int, other: GemmWork) -> GemmWork:
        return GemmWork(
            flops=self.flops + times * other.flops,
            edge_flops=self.edge_flops + times * other.edge_flops,
            misaligned_flops=self.misaligned_flops + times * other.misaligned_flops,
        )


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """Core attention, forward."""

    flops: Number
    """of flash attention: causal, so half of the square"""
    scores: Number
    """elements of the square, for kernels that materialize it"""
    kernel: Number
    """index into ATTENTION_KERNELS"""
    wide_heads: Number
    """1 if a head has WIDE_HEAD_DIM elements or more"""


@dataclass(frozen=True, kw_only=True)
class ElementwiseTraffic:
    """Elements of 16 bits that operators between GEMMs read and write."""

    norms: Number
    """by norms and residual additions, forward"""
    other: Number
    """by all other operators, forward"""
    backward_ratio: Number
    """traffic of backward over that of forward"""
    recompute_ratio: Number
    """traffic of recompute=ops over that of forward"""
    core_recompute_ratio: Number = 0.0
    """traffic of the operators inside a recomputed attention core, over that of forward"""
    fused_norms: Number = True
    cast: Number = 0.0
    """that other programs cast to the dtype of low-precision GEMMs, forward"""


@dataclass(frozen=True, kw_only=True)
class TpTraffic:
    """Collectives of tensor parallelism."""

    ranks: Number
    ring_ranks: Number
    """of its largest group: an axis of a grid has fewer than all"""
    wire_bytes: Number
    overlapped_bytes: Number
    """of these, the steps of a grid that run beside GEMMs"""
    num_collectives: Number
    in_node: Number
    """1 if a group fits a node"""
    ranks_per_node: Number


@dataclass(frozen=True, kw_only=True)
class ExpertTraffic:
    """Collectives of expert parallelism on the links of the busiest rank."""

    intra_node_bytes: Number = 0.0
    inter_node_bytes: Number = 0.0
    leaf_bytes: Number = 0.0
    """of these, what leaves a leaf switch"""
    num_collectives: Number = 0
    num_messages: Number = 0
    """to ranks of other nodes"""
    pairs_microbatches: Number = False
    """1 where they are overlapped with the compute of another microbatch"""


@dataclass(frozen=True, kw_only=True)
class CpTraffic:
    """Transfers of context parallelism, and what it adds to memory traffic."""

    ring_steps: Number = 1
    """blocks of attention that a ring takes; 1: there is no ring"""
    ring_bytes: Number = 0.0
    """keys and values that a rank sends in each step but the last"""
    ring_grad_bytes: Number = 0.0
    """their gradients"""
    ring_in_node: Number = True
    intra_node_bytes: Number = 0.0
    """of collectives, on a rank's link inside its node"""
    inter_node_bytes: Number = 0.0
    num_collectives: Number = 0.0
    is_blockwise: Number = False
    """1 if attention is several calls whose results are merged"""
    memory_bytes: Number = 0.0
    """read and written beside attention, forward"""
    memory_bytes_backward: Number = 0.0


@dataclass(frozen=True, kw_only=True)
class RecomputeShares:
    """Shares of the forward pass that backward recomputes."""

    layers: Number = 0.0
    attention: Number = 0.0
    """of attention, besides recomputed layers"""
    elementwise: Number = 0.0
    """of operators between GEMMs, besides recomputed layers"""
    gemms: Number = 0.0
    """of GEMMs, besides recomputed layers; negative where these leave some out"""
    experts: Number = False
    """of experts, besides recomputed layers: chunked dispatch saves nothing"""


@dataclass(frozen=True, kw_only=True)
class MicrobatchWork:
    """One microbatch through all layers: the same for layouts that differ in pp, dp, zero and schedule alone."""

    device: DeviceRates
    program: Number
    """index into PROGRAMS"""
    num_layers: Number
    num_moe_layers: Number
    is_launched: Number
    """0 where a CUDA graph launches the step at once"""
    is_trained: Number
    """0 where weights are frozen: their GEMMs run twice and not three times"""
    dense_gemms: GemmWork
    router_flops: Number
    """of routers in float32, where Echelon's kernels run"""
    expert_gemms: GemmWork
    """on the busiest rank"""
    head_gemm: GemmWork
    loss_bytes: Number
    """a third of what the loss and both gradients of its logits move"""
    attention: AttentionWork
    elementwise: ElementwiseTraffic
    compression_bytes: Number
    """moved to compress saved activations, or to copy them, and back"""
    tp: TpTraffic
    ep: ExpertTraffic
    cp: CpTraffic
    recompute: RecomputeShares


@dataclass(frozen=True, kw_only=True)
class PipelineWork:
    """The pipeline, and the transfers between its stages."""

    pp: Number
    vpp: Number
    num_microbatches: Number
    schedule: Number
    """index of its bubble in `bubble_times`"""
    max_layer_share: Number
    """of the layers, on the rank with the most"""
    is_even: Number
    """1 if all stages have as many layers, so that the head comes on top"""
    p2p_bytes: Number
    """of one transfer"""
    in_node: Number


@dataclass(frozen=True, kw_only=True)
class GroupTraffic:
    """What a step sends over one process group of data parallelism."""

    ranks: Number = 1
    ranks_per_node: Number = 1
    in_node: Number = True
    gather_bytes: Number = 0.0
    """of parameters, on a rank's links"""
    reduce_bytes: Number = 0.0
    """of gradients"""
    num_collectives: Number = 0.0

    @property
    def wire_bytes(self) -> Number:
        return self.gather_bytes + self.reduce_bytes


@dataclass(frozen=True, kw_only=True)
class DpTraffic:
    """Gathers of parameters and reductions of gradients, of a step."""

    ranks: Number
    in_node: Number
    ranks_per_node: Number
    shards: GroupTraffic
    """among the ranks that shard parameters: all-gathers and reduce-scatters"""
    replicas: GroupTraffic
    """among those that hold the same shards: all-reduces"""
    expert_shards: GroupTraffic
    expert_replicas: GroupTraffic
    every_microbatch: Number
    """1 if gradients are scattered after every microbatch (zero 2 and 3)"""
    regathers: Number
    """1 if parameters are gathered for forward and again for backward (zero 3)"""

    @property
    def groups(self) -> tuple[GroupTraffic, ...]:
        return self.shards, self.replicas, self.expert_shards, self.expert_replicas

    @property
    def wire_bytes(self) -> Number:
        return sum((group.wire_bytes for group in self.groups), start=0.0)


@dataclass(frozen=True, kw_only=True)
class UpdateWork:
    """The optimizer's update on the device."""

    num_params: Number = 0.0
    memory_bytes: Number = 0.0
    """read and written; 0: what other frameworks move"""
    flops: Number = 0.0
    """of GEMMs on full matrices (Muon)"""
    wire_bytes: Number = 0.0
    num_collectives: Number = 0


@dataclass(frozen=True, kw_only=True)
class OffloadWork:
    """Transfers to the host and its update."""

    host_bandwidth: Number
    """bytes per second"""
    link_bytes: Number
    page_bytes: Number
    """each way during an update on the device, whose states are on the host"""
    num_params: Number
    """that the host updates for this rank"""
    params_per_second: Number
    disk_seconds: Number


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Everything that one step does on one rank."""

    microbatch: MicrobatchWork
    weight_bytes: Number
    """that a microbatch moves for weights besides GEMMs: casts to fp8, accumulation of gradients"""
    pipeline: PipelineWork
    dp: DpTraffic
    update: UpdateWork
    offload: OffloadWork


def stack_work(works: Sequence[StepWork], *, shared_microbatch: bool = False) -> StepWork:
    """Stack many steps into one, an array for each number; `shared_microbatch` keeps the first one's as it is."""
    microbatch = works[0].microbatch if shared_microbatch else _stack([work.microbatch for work in works])
    rest = [field.name for field in fields(StepWork) if field.name != "microbatch"]
    return StepWork(microbatch=microbatch, **{name: _stack([getattr(work, name) for work in works]) for name in rest})


def _stack(values: Sequence[Any]) -> Any:
    """Stack numbers, or records of numbers."""
    if not is_dataclass(values[0]):
        return np.array(values)
    names = [field.name for field in fields(values[0])]
    record: Callable[..., Any] = type(values[0])
    return record(**{name: _stack([getattr(value, name) for value in values]) for name in names})
