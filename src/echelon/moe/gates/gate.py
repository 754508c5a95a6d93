"""What all gates have in common: a router in at least 32 bits, scores per token, and a decision per group.

[Note: scores and route]
A gate works in two steps, because they see different things:

    x [G, T, width] --scores--> [G, T, S] --route--> Routing

`scores` is a function of each token alone, with all random numbers in it. `route` is a function of whole groups alone
and draws nothing. Where a sequence is spread over ranks, the scores are gathered in between (they are narrow), every
rank makes the same decision and keeps that of its own tokens (`Routing.keep`).

[Note: which gates leak]
In causal training a token must not depend on those behind it. A gate leaks where a later token of the group can change
how an earlier one is routed; balance losses do not count, since no prediction depends on them.

    does not leak   a token's own scores decide: noisy-top-k, hierarchical, mixtral, qwen, loss-free, deepseek-v2, -v3
                    places are given in the order of the tokens: switch, mixtral and qwen with a capacity
    leaks           experts compare all tokens: expert-choice, expert-choice-capped
                    all first choices get their places before any second one, so that a later token's first choice
                    can take the place of an earlier token's second: gshard, unless its order is "tokens"
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
"""standard deviation of a router's first values, where the gate's paper has no rule of its own"""


def raise_errors(gate: str, errors: Sequence[str]) -> None:
    """Raises all that is wrong with a gate's arguments at once, if anything is."""
    if errors:
        raise ValueError(f"gate {gate}: " + "; also ".join(errors))


class Gate(nn.Module):
    """Decides which experts see which tokens."""

    weight: nn.Parameter
    leaks_future: bool = False
    """a later token can change an earlier one's experts; see [Note: which gates leak]"""
    k: float
    """experts of a token, on average where experts choose"""
    balances_by_load: bool = False
    """`end_step` must be told the loads of every step"""
    wide_buffers: tuple[str, ...] = ()
    """of at least 32 bits whatever the model's type is"""

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
        found = [
            f"{name} is less than 1 ({name}={value}); use 1 or more"
            for name, value in (("width", width), ("num_experts", num_experts), ("local_groups", local_groups))
            if value < 1
        ]
        raise_errors(type(self).__name__, (*found, *errors))
        self.width, self.num_experts, self.k = width, num_experts, k
        self.local_groups = local_groups
        """parts into which a group is cut, which are routed one by one"""
        self._param_init: dict[str, Init] = {}
        self.add_router("weight", num_experts, init or normal_init(ROUTER_INIT_STD))

    def add_router(self, name: str, rows: int, init: Init) -> None:
        """A parameter [rows, width]. Its first values come from a seed of torch's generator, as any module's do."""
        parameter = nn.Parameter(torch.empty(rows, self.width))
        self.register_parameter(name, parameter)
        self._param_init[name] = init
        if not parameter.is_meta:
            init.fill(parameter, int(torch.randint(1 << 62, (), device="cpu")), name)

    def initial(self, name: str) -> Init:
        """How the parameter or buffer of this name starts."""
        return self._param_init[name]

    def scores(self, x: Tensor) -> Tensor:
        """[G, T, S]: what is computed of each token alone."""
        return self.logits(x, self.weight)

    @property
    def num_scores(self) -> int:
        """S."""
        return self.num_experts

    def logits(self, x: Tensor, *weights: Tensor) -> Tensor:
        """One product with all these routers, in fp32 or fp64 whatever the model's type is.

        In 16 bits, logits that differ by less than a hundredth are often equal, and exp makes their errors large.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(wide), torch.cat(weights).to(wide))

    def route(self, scores: Tensor) -> Routing:
        """The decision for whole groups, from the scores of all their tokens."""
        groups, tokens, _ = scores.shape
        if self.local_groups == 1:
            return self.choose(scores)
        if tokens % self.local_groups and not self.training:
            return self.choose(scores)  # a text that is being written has any length
        if tokens % self.local_groups:
            raise ValueError(
                f"local groups do not divide a group's tokens (tokens={tokens}, local_groups={self.local_groups}); "
                "change one of them"
            )
        found = self.choose(scores.reshape(groups * self.local_groups, tokens // self.local_groups, -1))
        return replace(found, loss=found.loss.view(groups, self.local_groups).mean(1))

    def choose(self, scores: Tensor) -> Routing:
        """The decision for groups that are not cut further."""
        raise NotImplementedError

    def forward(self, x: Tensor, decide: Callable[[Tensor], Routing] | None = None) -> Routing:
        """`decide` takes the place of `route` where groups are spread over ranks: hooks on the gate must run there too,
        since its router may be a unit of its own, which they gather."""
        return (decide or self.route)(self.scores(x))

    def end_step(self, load: Tensor) -> None:
        """Once per step, with the choices of each expert in the whole batch, over all microbatches and ranks."""

    def extra_repr(self) -> str:
        return f"width={self.width}, num_experts={self.num_experts}, k={self.k}"


class TokenGate(Gate):
    """A gate by which each token chooses k experts."""

    k: int

    def __init__(
        self,
        width: int,
        num_experts: int,
        k: int,
        *,
        local_groups: int = 1,
        init: Init | None = None,
        errors: Sequence[str] = (),
    ) -> None:
        if not 1 <= k <= num_experts:
            errors = (f"k is not in 1 .. {num_experts} (k={k}, num_experts={num_experts}); change one", *errors)
        super().__init__(width, num_experts, k, local_groups=local_groups, init=init, errors=errors)
