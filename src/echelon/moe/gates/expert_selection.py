"""Building blocks of gates: deterministic top-k, router scores, group limits, expert capacity."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from echelon.moe.routing import count_tokens_per_expert


def stable_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, indices) of the k largest along the last dim, in descending order. Values are differentiable.

    `torch.topk` may return any of equal values depending on the shape of the tensor: a token would be routed
    differently in another layout.
    """
    indices = scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return scores.gather(-1, indices), indices


def scatter_dense(indices: Tensor, values: Tensor, size: int) -> Tensor:
    """[..., size]: the values at their indices, which are unique, and 0 elsewhere. Index `size` is dropped."""
    zeros = values.new_zeros(*values.shape[:-1], size + 1)
    return zeros.scatter(-1, indices, values)[..., :size]


SCORE_FUNCTIONS = ("softmax", "sigmoid")


def affinity(logits: Tensor, score_function: str) -> Tensor:
    """Router scores in (0, 1): softmax over the experts of a token, or a sigmoid of each."""
    return logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()


def normalise(x: Tensor) -> Tensor:
    """Normalise to sum 1 along the last dim."""
    # All sigmoids can underflow.
    return x / x.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


def score_function_errors(score_function: str) -> list[str]:
    if score_function in SCORE_FUNCTIONS:
        return []
    return [f"score is not one of {', '.join(SCORE_FUNCTIONS)} (score={score_function}); use one of them"]


def limit_groups(scores: Tensor, num_groups: int, limit: int, best: int) -> Tensor:
    """Scores [.., E] with -inf outside the `limit` groups whose `best` highest scores have the largest sum.

    A group is a run of consecutive experts, whichever ranks hold them: a token is sent to that many devices at most.
    """
    if limit == num_groups:
        return scores
    grouped = scores.unflatten(-1, (num_groups, -1))
    rank = stable_top_k(grouped, best)[0].sum(-1)
    values, groups = stable_top_k(rank, limit)
    chosen = scatter_dense(groups, values.new_ones(values.shape), num_groups) > 0
    out: Tensor = grouped.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(-2)
    return out


def group_limit_errors(num_experts: int, k: int, num_groups: int, limit: int) -> list[str]:
    if num_groups < 1 or num_experts % num_groups:
        return [f"num_groups does not divide the experts ({num_experts} experts, num_groups={num_groups}); change one"]
    if not 1 <= limit <= num_groups:
        return [f"group_limit is not in 1 .. {num_groups} (group_limit={limit}, num_groups={num_groups}); change one"]
    if limit * (num_experts // num_groups) < k:
        return [
            f"{limit} groups of {num_experts // num_groups} experts have less than k "
            f"(k={k}, num_groups={num_groups}, group_limit={limit}); use a higher group_limit or fewer groups"
        ]
    return []


def expert_capacity(factor: float, num_choices: int, num_experts: int) -> int:
    """Capacity of an expert in a group: the mean choices per expert times a factor, rounded up."""
    # 1.1 x 10 is 11.000000000000002 and must not become 12.
    return max(1, math.ceil(factor * num_choices / num_experts - 1e-9))


def within_capacity(experts: Tensor, factor: float | None, num_experts: int) -> Tensor | None:
    """[G, T, k]: which choices are within the capacity, given in token order; none without a capacity."""
    if factor is None:
        return None
    choices = experts.flatten(1)
    capacity = expert_capacity(factor, choices.shape[1], num_experts)
    return positions_in_expert(choices, num_experts).view_as(experts) < capacity


def switch_loss(balance: float, experts: Tensor, p: Tensor) -> Tensor:
    """[G]: balance · E · sum over e of f_e · P_e, f_e: choices of an expert per token, P_e: its mean score."""
    num_experts = p.shape[-1]
    f = count_tokens_per_expert(experts.flatten(1), num_experts).to(p.dtype) / p.shape[1]
    return balance * num_experts * (f * p.mean(1)).sum(-1)


def positions_in_expert(experts: Tensor, num_experts: int) -> Tensor:
    """From experts [G, N] in order of arrival to the number of earlier choices of the same expert."""
    order = experts.sort(dim=-1, stable=True).indices
    counts = count_tokens_per_expert(experts, num_experts)
    # Sorted by expert, the choices of an expert start at the sum of the counts before it; choices that were not made
    # (`num_experts`) come last.
    ends = counts.cumsum(-1)
    first = torch.cat((ends - counts, ends[:, -1:]), dim=-1)
    arrival = torch.arange(experts.shape[-1], device=experts.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, arrival)
    return rank - first.gather(-1, experts)
