"""Experts of transformers' MoE classes: one module with the stacked weights of all, called with tokens and choices.

Nearly every class calls it as `experts(hidden [N, width], experts [N, k], weights [N, k])`; what takes other arguments
is not counted or divided. So the load of each expert is
counted, and its experts are divided over ranks (parallel/ep/foreign_dispatch.py), without knowing the class.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, Protocol

from torch import Tensor, nn

from echelon.moe.routing import count_tokens_per_expert


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the stacked weights of several experts."""
    count = getattr(module, "num_experts", None)
    parameters = list(module.parameters(recurse=False))
    stacked = sum(p.dim() == 3 for p in parameters) >= 2 and len(signature(module.forward).parameters) == 3
    return isinstance(count, int) and stacked and all(p.shape[0] == count for p in parameters)


class ExpertDispatch(Protocol):
    """Experts of which other ranks hold some."""

    def run(self, experts: ForeignExperts, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor: ...


class ForeignExperts(nn.Module):
    """What `adapt` puts before the class of the experts."""

    dispatch: ExpertDispatch | None = None
    """none: all experts are local"""
    counts_load = True
    """count the load of this forward; activation checkpointing turns it off while it recomputes"""
    expert_load: Tensor | None = None
    """[E + 1] int64: assignments of this rank's tokens to each expert in this step, and 0 dropped ones"""
    all_experts: int

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        choices, weights = (*args, *kwargs.values())
        if self.training and self.counts_load:
            load = count_tokens_per_expert(choices.flatten(), self.all_experts)
            load = nn.functional.pad(load, (0, 1))
            self.expert_load = load if self.expert_load is None else self.expert_load + load
        if self.dispatch is not None:
            return self.dispatch.run(self, hidden_states, choices, weights)
        return self.compute(hidden_states, choices, weights)

    def compute(self, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        """Run the class's own code on local experts."""
        out: Tensor = super().forward(hidden, choices, weights)
        return out

    def end_step(self, load: Tensor) -> None:
        """Forget the loads of a step. Gates of transformers do not follow them."""
        self.expert_load = None
