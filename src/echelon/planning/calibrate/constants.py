"""Constants fitted to measured runs: the efficiency that programs reach.

They depend on no model and no source. `bench/fit.py` fits them; `echelon score` scores them. NATIVE_OVERRIDES are those
of our kernels, where measured. calibration.py replaces them by measurements of a machine (`echelon bench`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Constants:
    # GEMMs: share of the peak that large ones reach
    volta: float = 0.714
    ampere: float = 0.676
    hopper: float = 0.671
    blackwell: float = 0.562
    cpu: float = 0.7
    """assumed, not fitted: there are no published runs on CPUs"""
    hopper_fp8: float = 0.62
    blackwell_fp8: float = 0.631
    fp4: float = 0.471
    edge: float = 107
    """elements added to each dimension of a GEMM, for partly filled tiles"""
    misaligned_gemms: float = 0.768
    """extra time of a GEMM whose dims are not multiples of 64"""
    expert_edge: float = 1.4e03
    """`edge` of the grouped GEMMs of experts"""
    # attention: share of the 16-bit peak
    flash1: float = 0.29
    flash2: float = 0.381
    flash2_hopper: float = 0.175
    best_attention: float = 0.391
    blockwise_attention: float = 0.98
    """attention in the blocks of context parallelism, to that in one call, without merging: less than 1, as all but one
    block have no mask; published runs say little about it, anything from 0.95 to 1.02 suits them"""
    fused_score_bytes: float = 13
    """bytes moved per score that is written out, with a fused softmax"""
    plain_score_bytes: float = 29.2
    """the same with plain operators"""
    # memory
    memory_bandwidth: float = 0.992
    """share of the memory's bandwidth that operators reach"""
    unfused_norms: float = 9.36
    """times the bytes that norms of several kernels move, to those of one"""
    cast_bytes: float = 6.02
    """bytes moved per element to cast the inputs of low-precision GEMMs"""
    # starting
    launch: float = 0.000307
    """seconds of the host to launch a layer's kernels, forward or backward"""
    launch_experts: float = 0.0025
    """seconds more in a layer with experts: sorting tokens, many small kernels, waiting for counts"""
    step_overhead: float = 0.045
    """seconds of a step outside all that is counted"""
    single_device_share: float = 0.5
    """share of that on a single device"""
    # links
    intra_node: float = 0.864
    """share of the bandwidth inside a node"""
    inter_node: float = 0.852
    """of that between nodes"""
    pre_hopper_links: float = 0.716
    """share of both that programs before Hopper reach"""
    tp_exposed: float = 0.444
    """exposed share of tensor-parallel communication since Hopper; before, all of it"""
    ep_exposed: float = 0.28
    pp_exposed: float = 0.163
    dp_overlap: float = 1.69
    """backwards of a microbatch that overlap gradient reduction, since Hopper"""
    fsdp_overlap: float = 0.756
    """share of compute that overlaps parameter all-gathers of every microbatch"""
    fsdp_exposed: float = 1.44
    """exposed share of those all-gathers"""
    # the rest
    update_bytes: float = 21.6
    """bytes moved per parameter by the update"""
    # memory
    activation_slack: float = 0.2
    """share by which activations take more than is counted: copies, and blocks that are not full"""
    backward_working: float = 9
    """times the activations of a layer that its backward needs while it runs: gradients, copies, workspace"""
    context_gib: float = 4
    """GiB of a device's context and its communication library"""
    unfused_norm_saved: float = 7.0
    """elements per element of width that norms of several kernels save in a layer: their steps, in 32 bits"""
    # how sure
    spread: float = 0.11
    """four of five runs lie within this logarithm of the prediction"""
    spread_experts: float = 0.32
    """the same with experts"""


FITTED_CONSTANTS = Constants()
DEFAULT_IMBALANCE = 1.3
"""default max/mean expert load across ep ranks. Of the busiest expert Wang et al. (2024)
publish 1.04 with a bias that balances and 1.5 to 1.7 with a loss; published pairs of runs with and without forced
balance (Qwen3-235B) differ as 1.5 to 1.9 would. Between both: the geometric mean"""
NATIVE_OVERRIDES: dict[str, float] = {
    "hopper": 0.706,
    "hopper_fp8": 0.666,
    "best_attention": 0.553,
    "blockwise_attention": 1.07,  # bench/ring_attention.py at 32,768 tokens: 1.04 on four ranks, 1.11 on eight
    "expert_edge": 107.0,  # as of other GEMMs; MoE runs agree (bench/measured/h200-mixtures.json)
    "launch_experts": 0.0004,  # some 65 kernels more than in a dense layer, of 6 microseconds of the host each
    "memory_bandwidth": 0.787,
    "cast_bytes": 0.0,  # counted by what they read and write (layer_counts.py)
    "single_device_share": 0.0,  # the host is a step ahead of its device
}
"""in their place where our kernels run: fitted to runs on one H200 (bench/measured/h200.json). Shares of what a
device states are taken to be the same on other kinds, where nothing of ours was measured"""
