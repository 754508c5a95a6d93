"""Every number that was fitted to measured runs: what programs reach of what devices could do.

They belong to no model and no source. `bench/fit.py` fits them; `echelon score` says how well they do.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Constants:
    # products: share of the peak that large ones reach
    volta: float = 0.687
    ampere: float = 0.673
    hopper: float = 0.663
    blackwell: float = 0.558
    hopper_fp8: float = 0.596
    blackwell_fp8: float = 0.602
    fp4: float = 0.448
    edge: float = 69.3
    """elements that each dimension of a product is longer than it is, for partly filled tiles"""
    odd: float = 0.69
    """share that a product is longer where tiles of 64 do not divide it"""
    expert_edge: float = 1e03
    """the same, in the grouped products of experts"""
    imbalance: float = 1.04
    """load of the fullest expert over the mean"""
    # attention: share of the 16-bit peak
    flash1: float = 0.262
    flash2: float = 0.384
    flash2_hopper: float = 0.177
    best_attention: float = 0.392
    scores: float = 7.11
    """bytes moved per score that is written out, with a fused softmax"""
    plain_scores: float = 19.7
    """the same with plain operators"""
    # memory
    streaming: float = 0.66
    """share of the memory's bandwidth that operators reach"""
    loose_norms: float = 5.37
    """times the bytes that norms of several kernels move, to those of one"""
    casts: float = 2.7
    """bytes moved per element that operators between narrow products pass, to narrow it"""
    # starting
    launch_old: float = 0.000609
    """seconds to start a layer's kernels, forward or backward, in programs before Hopper"""
    launch: float = 0.000301
    """since"""
    launch_experts: float = 0.00301
    """seconds more in a layer with experts: sorting tokens, many small kernels, waiting for counts"""
    step: float = 0.0463
    """seconds of a step outside everything"""
    # links
    inside: float = 0.814
    """share of the bandwidth inside a node"""
    outside: float = 0.844
    """of that between nodes"""
    links_old: float = 0.742
    """share of both that programs before Hopper reach"""
    message: float = 3.17e-05
    """seconds before a collective moves"""
    tp_shown: float = 0.356
    """share of tensor-parallel messages that compute does not hide, since Hopper; before, all"""
    ep_shown: float = 0.227
    cp_shown: float = 0.502
    pp_shown: float = 0.17
    dp_hidden: float = 1.28
    """share of a microbatch's backward that hides the reduction of gradients, since Hopper"""
    stream_hidden: float = 0.759
    """share of compute that hides parameters on their way, where they are gathered for every microbatch"""
    stream_shown: float = 0.764
    """share of those messages that nothing hides"""
    # the rest
    update: float = 25.2
    """bytes moved per parameter by the update"""
    jitter: float = 0.0013
    """share of a step that is added with each doubling of the nodes"""
    # memory
    slack: float = 0.2
    """share of activations that the allocator loses between blocks"""
    working: float = 4.0
    """times the activations of a layer that its backward needs while it runs: gradients, copies, workspace"""
    context: float = 2.0
    """GiB of a device's context and its communication library"""
    # how sure
    spread: float = 0.11
    """four of five runs lie within this logarithm of the prediction"""
    spread_experts: float = 0.32
    """the same with experts"""


FITTED = Constants()
