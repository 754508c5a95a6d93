"""The mixture layer: a gate, its experts, and experts that every token passes through (shared).

Nothing is dropped unless the gate drops it. How many tokens an expert gets is not known beforehand, but how many there
are in all is: a layer holds (experts of a token) x (its tokens) rows, however they are spread over the experts.
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
    """How a layer reaches the rest of its groups and the experts that are elsewhere."""

    def route(self, mixture: MoELayer, x: Tensor) -> Routing:
        """What the gate gives for the tokens at hand."""
        ...

    def dispatch(self, mixture: MoELayer, x: Tensor, routing: Routing) -> Callable[[], Tensor]:
        """Sends tokens [tokens, width] on their way. Who asks what is returned gets what `at_hand` gives."""
        ...


class MoELayer(nn.Module):
    """[G, T, width] to the same, and the gate's losses [G]. A group is a sequence."""

    dispatcher: TokenDispatcher | None = None
    """takes over; none: all groups are whole and all experts are here"""

    def __init__(self, gate: Gate, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.experts, self.shared = gate, experts, shared
        self.counts_load = True
        """this forward is not a repetition of one that was counted"""
        self.expert_load: Tensor | None = None
        """[E + 1] int64 on the device: assignments of each expert in the step so far, before any was dropped; and how
        many were dropped"""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        routing = self.gate(x) if self.dispatcher is None else self.dispatcher.route(self, x)
        if self.training and self.counts_load:
            found = torch.cat([routing.load, routing.dropped[None]]).detach()
            self.expert_load = found if self.expert_load is None else self.expert_load + found
        routing = replace(routing, dropout_keys=self.experts.drop.assignment_keys(x, routing))
        start = self.compute_locally if self.dispatcher is None else partial(self.dispatcher.dispatch, self)
        finish = start(x.flatten(0, 1), routing)
        # Tokens are on their way now, and in backward their gradients will be while this is computed.
        shared = self.shared(x) if self.shared is not None else None
        out = finish().view_as(x)
        return out if shared is None else out + shared, routing.loss

    def compute_locally(self, x: Tensor, routing: Routing, *, trim: bool = False) -> Callable[[], Tensor]:
        """[tokens, width]: the sum of what each token's experts, all of them here, make of it.

        `trim` asks the device how many assignments go anywhere, and makes rows of these alone.
        """

        def finish() -> Tensor:
            order = TokenPermutation.from_routing(routing)
            order = order.truncate(int(order.counts.sum())) if trim else order
            return order.unpermute(
                self.experts(order.permute(x), order.expert_ends, order.dropout_keys), routing.weights
            )

        return finish

    def end_step(self, load: Tensor) -> None:
        """After an update, with the choices of each expert in the whole batch; all 0 where nothing was updated."""
        self.gate.end_step(load)
        self.expert_load = None
