"""The MoE layer: gate, routed experts and a shared expert.

The layer drops no token unless the gate does. The number of tokens of an expert is dynamic, their total is not: k times
the tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from echelon.moe.experts import Experts
from echelon.moe.gates.gate import Gate
from echelon.moe.routing import Routing
from echelon.moe.token_permutation import TokenPermutation


class TokenDispatcher(Protocol):
    """Routing and token dispatch where sequences or experts are split over ranks (parallel/ep)."""

    def route(self, layer: MoELayer, x: Tensor) -> Routing:
        """Route the local tokens."""
        ...

    def dispatch(self, layer: MoELayer, x: Tensor, routing: Routing) -> Callable[[], Tensor]:
        """Start sending tokens [tokens, width] to their experts; the result waits and returns their outputs."""
        ...


class MoELayer(nn.Module):
    """From [G, T, width] to the same shape, and the balance losses [G]. A group is a sequence."""

    dispatcher: TokenDispatcher | None = None
    """none: all tokens of a sequence and all experts are local"""

    def __init__(self, gate: Gate, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.experts, self.shared = gate, experts, shared
        self.counts_load = True
        """count the load of this forward; activation checkpointing turns it off while it recomputes"""
        self.expert_load: Tensor | None = None
        """[E + 1] int64: assignments of each expert in this step before dropping, and the dropped ones"""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        routing = self.gate(x) if self.dispatcher is None else self.dispatcher.route(self, x)
        if self.training and self.counts_load:
            load = torch.cat([routing.load, routing.dropped[None]]).detach()
            self.expert_load = load if self.expert_load is None else self.expert_load + load
        routing = replace(routing, dropout_keys=self.experts.drop.assignment_keys(x, routing))
        dispatch = self.compute_locally if self.dispatcher is None else partial(self.dispatcher.dispatch, self)
        finish = dispatch(x.flatten(0, 1), routing)
        # The shared expert overlaps the all-to-all, in backward that of the gradients.
        shared = self.shared(x) if self.shared is not None else None
        out = finish().view_as(x)
        return out if shared is None else out + shared, routing.loss

    def compute_locally(self, x: Tensor, routing: Routing, *, trim: bool = False) -> Callable[[], Tensor]:
        """Compute all experts on this rank: [tokens, width], the weighted sum of each token's experts.

        `trim` synchronises with the device to leave out dropped assignments.
        """

        def finish() -> Tensor:
            order = TokenPermutation.from_routing(routing)
            order = order.truncate(int(order.counts.sum())) if trim else order
            y = self.experts(order.permute(x), order.expert_ends, order.dropout_keys)
            return order.unpermute(y, routing.weights)

        return finish

    def end_step(self, load: Tensor) -> None:
        """Update the gate after a step from the expert load of the global batch; zeros if the step was skipped."""
        self.gate.end_step(load)
        self.expert_load = None
