"""Every number that was fitted to measured runs: what programs reach of what devices could do.

They belong to no model and no source. `bench/fit.py` fits them; `echelon score` says how well they do.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Constants:
    # products: share of the peak that large ones reach
    volta: float = 0.69
    ampere: float = 0.672
    hopper: float = 0.669
    blackwell: float = 0.562
    hopper_fp8: float = 0.61
    blackwell_fp8: float = 0.623
    fp4: float = 0.463
    edge: float = 96.3
    """elements that each dimension of a product is longer than it is, for partly filled tiles"""
    odd: float = 0.761
    """share that a product is longer where tiles of 64 do not divide it"""
    expert_edge: float = 1.31e03
    """the same, in the grouped products of experts"""
    # attention: share of the 16-bit peak
    flash1: float = 0.288
    flash2: float = 0.382
    flash2_hopper: float = 0.175
    best_attention: float = 0.391
    scores: float = 10.7
    """bytes moved per score that is written out, with a fused softmax"""
    plain_scores: float = 26.9
    """the same with plain operators"""
    # memory
    streaming: float = 0.917
    """share of the memory's bandwidth that operators reach"""
    loose_norms: float = 8.53
    """times the bytes that norms of several kernels move, to those of one"""
    casts: float = 5.17
    """bytes moved per element that operators between narrow products pass, to narrow it"""
    # starting
    launch: float = 0.000305
    """seconds of the host to start a layer's kernels, forward or backward"""
    launch_experts: float = 0.00282
    """seconds more in a layer with experts: sorting tokens, many small kernels, waiting for counts"""
    step: float = 0.046
    """seconds of a step outside everything"""
    # links
    inside: float = 0.851
    """share of the bandwidth inside a node"""
    outside: float = 0.848
    """of that between nodes"""
    links_old: float = 0.721
    """share of both that programs before Hopper reach"""
    tp_shown: float = 0.419
    """share of tensor-parallel messages that compute does not hide, since Hopper; before, all"""
    ep_shown: float = 0.242
    cp_shown: float = 0.528
    pp_shown: float = 0.158
    dp_hidden: float = 1.58
    """share of a microbatch's backward that hides the reduction of gradients, since Hopper"""
    stream_hidden: float = 0.754
    """share of compute that hides parameters on their way, where they are gathered for every microbatch"""
    stream_shown: float = 1.33
    """share of those messages that nothing hides"""
    # the rest
    update: float = 22.3
    """bytes moved per parameter by the update"""
    # memory
    slack: float = 0.22
    """share of activations that the allocator loses between blocks"""
    working: float = 7.7
    """times the activations of a layer that its backward needs while it runs: gradients, copies, workspace"""
    context: float = 2.9
    """GiB of a device's context and its communication library"""
    # how sure
    spread: float = 0.11
    """four of five runs lie within this logarithm of the prediction"""
    spread_experts: float = 0.32
    """the same with experts"""


FITTED = Constants()
