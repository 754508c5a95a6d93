"""How many tokens of a group an expert takes, and who gets a place: first come, first served."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from echelon.moe.routing import count_assignments


def expert_capacity(factor: float, num_choices: int, num_experts: int) -> int:
    """Places of an expert in a group: its fair share of all choices of all tokens, times a factor, rounded up."""
    # 1.1 x 10 is 11.000000000000002 and must not become 12.
    return max(1, math.ceil(factor * num_choices / num_experts - 1e-9))


def positions_in_expert(experts: Tensor, num_experts: int) -> Tensor:
    """[G, N] of experts in the order in which they come -> how many before each one went to the same expert."""
    order = experts.sort(dim=-1, stable=True).indices
    counts = count_assignments(experts, num_experts)
    # In the sorted list an expert's assignments stand together, from the sum of the counts before it on. Choices that
    # were not made (the number of experts) stand behind all others.
    ends = counts.cumsum(-1)
    first = torch.cat((ends - counts, ends[:, -1:]), dim=-1)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(experts.shape[-1], device=experts.device).expand_as(order)
    )
    return rank - first.gather(-1, experts)
