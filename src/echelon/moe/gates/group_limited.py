"""Experts of a few groups alone: a token is sent to no more devices, or nodes, than that."""

from __future__ import annotations

from torch import Tensor

from echelon.moe.gates.stable_top_k import scatter_dense, stable_top_k


def limit_groups(scores: Tensor, num_groups: int, limit: int, best: int) -> Tensor:
    """Scores [.., E] with minus infinity outside the `limit` groups whose `best` highest scores have the largest sum.

    A group is a run of neighbouring experts: a property of the model, wherever its experts are kept.
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
