"""The base class of gates: a router in at least fp32, scores per token, routing per group.

[Note: scores and route]
A gate works in two steps, because they see different things:

    x [G, T, width] --scores--> [G, T, S] --route--> Routing

`scores` is a function of each token alone and draws all random numbers. `route` is a function of full groups and draws
none. Where ranks split a sequence, they all-gather the scores in between (which are small), all compute the same
routing, and each selects its own tokens (`Routing.select_tokens`).

[Note: which gates leak]
In causal training a token must not depend on later ones. A gate leaks if a later token of the group can change the
routing of an earlier one; balance losses do not count, since no prediction depends on them.

    does not leak   a token's own scores decide: noisy-top-k, hierarchical, mixtral, qwen, loss-free, deepseek-v2, -v3
                    capacity slots are given in token order: switch, mixtral and qwen with a capacity
    leaks           experts compare all tokens: expert-choice, expert-choice-capped
                    all first choices get their slots before any second one, so that a later token's first choice
                    can take the slot of an earlier token's second: gshard, unless its order is "tokens"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.moe.routing import Routing
from echelon.rng import Init, normal_init

ROUTER_INIT_STD = 0.02
"""initial standard deviation of a router, unless the gate's paper has another rule"""


def raise_errors(gate: str, errors: Sequence[str]) -> None:
    """Raise all errors of a gate's arguments at once."""
    if errors:
        raise ValueError(f"gate {gate}: " + "; also ".join(errors))


class Gate(nn.Module):
    """Assigns tokens to experts."""

    weight: nn.Parameter
    leaks_future: bool = False
    """later tokens can change the experts of earlier ones; see [Note: which gates leak]"""
    k: float
    """experts per token; the average for expert choice"""
    balances_by_load: bool = False
    """`end_step` uses the expert load of each step"""
    wide_buffers: tuple[str, ...] = ()
    """buffers of at least fp32, whatever the model's dtype"""

    def __init__(
        self,
        width: int,
        num_experts: int,
        k: float,
        *,
        local_groups: int = 1,
        init: Init | None = None,
        errors: Sequence[str] = (),
    ) -> None:
        super().__init__()
        invalid = [
            f"{name} is less than 1 ({name}={value}); use 1 or more"
            for name, value in (("width", width), ("num_experts", num_experts), ("local_groups", local_groups))
            if value < 1
        ]
        raise_errors(type(self).__name__, (*invalid, *self.k_errors(num_experts, k), *errors))
        self.width, self.num_experts, self.k = width, num_experts, k
        self.local_groups = local_groups
        """parts of a group that are routed separately"""
        self._param_init: dict[str, Init] = {}
        self.add_router("weight", num_experts, init or normal_init(ROUTER_INIT_STD))

    def k_errors(self, num_experts: int, k: float) -> list[str]:
        """Errors of `k`."""
        return []

    def add_router(self, name: str, rows: int, init: Init) -> None:
        """Add a parameter [rows, width], initialised from torch's generator as any module's."""
        parameter = nn.Parameter(torch.empty(rows, self.width))
        self.register_parameter(name, parameter)
        self._param_init[name] = init
        if not parameter.is_meta:
            init.fill(parameter, int(torch.randint(1 << 62, (), device="cpu")), name)

    def initial(self, name: str) -> Init:
        """Initial distribution of a parameter or buffer."""
        return self._param_init[name]

    def scores(self, x: Tensor) -> Tensor:
        """[G, T, S]: the scores of each token."""
        return self.logits(x, self.weight)

    @property
    def num_scores(self) -> int:
        """S."""
        return self.num_experts

    def logits(self, x: Tensor, *weights: Tensor) -> Tensor:
        """One GEMM with all routers, in fp32 or fp64 whatever the model's dtype.

        In 16 bits, logits that differ by less than a hundredth are often equal, and exp amplifies their errors.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(wide), torch.cat(weights).to(wide))

    def route(self, scores: Tensor) -> Routing:
        """Route full groups from the scores of all their tokens."""
        groups, tokens, _ = scores.shape
        if self.local_groups == 1:
            return self.choose(scores)
        if tokens % self.local_groups and not self.training:
            return self.choose(scores)  # generation has any length
        if tokens % self.local_groups:
            raise ValueError(
                f"local groups do not divide a group's tokens (tokens={tokens}, local_groups={self.local_groups}); "
                "change one of them"
            )
        routing = self.choose(scores.reshape(groups * self.local_groups, tokens // self.local_groups, -1))
        return replace(routing, loss=routing.loss.view(groups, self.local_groups).mean(1))

    def choose(self, scores: Tensor) -> Routing:
        """Route groups that are not split further."""
        raise NotImplementedError

    def forward(self, x: Tensor, decide: Callable[[Tensor], Routing] | None = None) -> Routing:
        """Score and route. `decide` replaces `route` where ranks split a group; it runs inside this call, so that FSDP
        hooks gather the router."""
        return (decide or self.route)(self.scores(x))

    def end_step(self, load: Tensor) -> None:
        """Called once per step with the assignments of each expert in the global batch."""

    def extra_repr(self) -> str:
        return f"width={self.width}, num_experts={self.num_experts}, k={self.k}"


class TokenGate(Gate):
    """A gate where each token chooses k experts."""

    k: int

    def k_errors(self, num_experts: int, k: float) -> list[str]:
        if 1 <= k <= num_experts:
            return []
        return [f"k is not in 1 .. {num_experts} (k={k}, num_experts={num_experts}); change one"]
