"""Constants fitted to measured runs: the efficiency that programs reach.

They depend on no model and no source. `bench/fit.py` fits them; `echelon score` scores them. NATIVE_OVERRIDES are those
of our kernels, where measured. calibration.py replaces them by measurements of a machine (`echelon bench`).
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.planning.calibrate.programs import FITTED_PROFILES, ProgramProfile


@dataclass(frozen=True, kw_only=True)
class Constants:
    # GEMMs: share of the peak that large ones reach
    volta: float = 0.77
    ampere: float = 0.695
    hopper: float = 0.591
    blackwell: float = 0.462
    cpu: float = 0.7
    """assumed, not fitted: there are no published runs on CPUs"""
    tpu: float = 0.911
    accelerator: float = 0.468
    """of AMD Instinct and accelerators that are no GPU, whose libraries are younger; few sources measured them"""
    hopper_fp8: float = 0.601
    blackwell_fp8: float = 0.627
    fp4: float = 0.462
    edge: float = 84
    """elements added to each dimension of a GEMM, for partly filled tiles"""
    misaligned_gemms: float = 0.559
    """extra time of a GEMM whose dims are not multiples of 64"""
    expert_edge: float = 216
    """`edge` of the grouped GEMMs of experts"""
    # attention: share of the 16-bit peak
    flash1: float = 0.285
    flash2: float = 0.351
    best_attention: float = 0.406
    """of the vendor's kernel, or the compiler's"""
    blackwell_attention: float = 0.493
    """the same on Blackwell, whose softmax and GEMMs run side by side"""
    blockwise_attention: float = 1.07
    """attention in the blocks of context parallelism, to that in one call: measured, not fitted
    (bench/ring_attention.py, the vendor's kernel at 32,768 tokens: 1.04 on four ranks, 1.11 on eight)"""
    fused_score_bytes: float = 10.8
    """bytes moved per score that is written out, with a fused softmax"""
    plain_score_bytes: float = 28.2
    """the same with plain operators"""
    # memory
    memory_bandwidth: float = 0.81
    """share of the memory's bandwidth that operators reach"""
    unfused_norms: float = 6.56
    """times the bytes that norms of several kernels move, to those of one"""
    cast_bytes: float = 4.17
    """bytes moved per element to cast the inputs of low-precision GEMMs"""
    # starting
    launch_experts: float = 0.0017
    """seconds more in a layer with experts: sorting tokens, many small kernels, waiting for counts"""
    launch: float = 0.00236
    """seconds of the host to launch a layer's kernels, forward or backward"""
    step_overhead: float = 0.0273
    """seconds of a step outside all that is counted: launches of the update, waiting for the slowest rank, logging"""
    single_device_share: float = 0.5
    """share of that on a single device"""
    # links
    intra_node: float = 0.739
    """share of the bandwidth inside a node"""
    inter_node: float = 0.655
    """of that between nodes"""
    hop_intra: float = 3.66e-06
    """seconds that each further device of a node adds to a collective"""
    hop_inter: float = 1.32e-05
    """the same of each further node"""
    congestion: float = 0.0284
    """share of the bandwidth between nodes that is lost whenever their number doubles"""
    ep_exposed: float = 0.554
    pp_exposed: float = 0.274
    contention: float = 0.134
    """share of overlapped communication by which it slows the compute that hides it"""
    # the rest
    update_bytes: float = 49
    """bytes moved per parameter by the update"""
    # memory
    activation_slack: float = 0.2
    """share by which activations take more than is counted: copies, and blocks that are not full"""
    backward_working: float = 9
    """times the activations of a layer that its backward needs while it runs: gradients, copies, workspace"""
    context_gib: float = 4
    """GiB of a device's context and its communication library"""
    unfused_norm_saved: float = 7
    """elements per element of width that norms of several kernels save in a layer: their steps, in 32 bits"""
    profiles: tuple[ProgramProfile, ...] = FITTED_PROFILES
    """of programs, in the order of PROGRAMS"""
    # how sure: four of five runs lie within this logarithm of the prediction, by constants that never saw their source
    # or their program (the mean of both widths: runs to come are of known programs and of others)
    spread: float = 0.177
    spread_experts: float = 0.334
    """of MoE models"""
    spread_own: float = 0.11
    """of Echelon on one device, whose kernels were measured"""
    spread_far: float = 1.2
    """times as wide if nothing near was measured (confidence.py): as of programs that were left out, to sources"""


FITTED_CONSTANTS = Constants()
DEFAULT_IMBALANCE = 1.3
"""default max/mean expert load across ep ranks. Of the busiest expert Wang et al. (2024)
publish 1.04 with a bias that balances and 1.5 to 1.7 with a loss; published pairs of runs with and without forced
balance (Qwen3-235B) differ as 1.5 to 1.9 would. Between both: the geometric mean"""
NATIVE_OVERRIDES: dict[str, float] = {
    "hopper": 0.706,
    "hopper_fp8": 0.666,
    "best_attention": 0.553,
    "blackwell_attention": 0.553,
    "expert_edge": 107.0,  # as of other GEMMs; MoE runs agree (bench/measured/h200-mixtures.json)
    "launch_experts": 0.0004,  # some 65 kernels more than in a dense layer, of 6 microseconds of the host each
    "memory_bandwidth": 0.787,
    "cast_bytes": 0.0,  # counted by what they read and write (layer_counts.py)
    "edge": 107.0,
    "misaligned_gemms": 0.768,
    "launch": 0.00145,  # steps of few tokens: 3 ms of a layer, forward and backward, from 4 layers to 48
    "plain_score_bytes": 29.2,
    "fused_score_bytes": 13.0,
    "single_device_share": 0.0,  # the host is a step ahead of its device
}
"""in their place where our kernels run: fitted to runs on one H200 (bench/measured/h200.json). Shares of what a
device states are taken to be the same on other kinds, where nothing of ours was measured"""
OPERATOR_OVERRIDES: dict[str, float] = {
    "launch": 0.00125,  # 2.5 ms of a layer, forward and backward, of a plain GPT-2
    "single_device_share": 0.0,
}
"""in their place where Echelon runs a model's own operators on a GPU (bench/measured/h200-small.json)"""
