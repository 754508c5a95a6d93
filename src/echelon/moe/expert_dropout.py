"""Dropout inside experts (Fedus et al. 2021, section 2.4), with masks that do not depend on where an expert is.

A token has a key of its own, a function of (seed, site, sample, position). With the expert's number it gives the key of
an assignment, and that with the hidden unit's number decides whether the unit is dropped. Rows that travel to another
rank take their key along.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.moe.routing import Routing
from echelon.rng import RandomDraws, bits, keep_mask


class ExpertDropout(RandomDraws):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def assignment_keys(self, x: Tensor, routing: Routing) -> Tensor | None:
        """[A] int64, of each assignment of the tokens of x [G, T, width]; none where nothing is dropped."""
        if not self.training or self.p == 0:
            return None
        groups, tokens = x.shape[:2]
        if self.stream is None:
            each = torch.randint(1 << 62, (groups * tokens,), device=x.device)
        else:
            each = bits(*self.keys_and_index((groups, tokens), self.window, x.device)).flatten()
        return bits(0, each.index_select(0, routing.tokens) ^ routing.experts)

    def keep_factors(self, keys: Tensor, first_unit: int, like: Tensor) -> Tensor:
        """[rows, units]: 0, or one over the chance to be kept, for the units of `like` from number `first` on."""
        units = torch.arange(first_unit, first_unit + like.shape[1], device=like.device)
        return keep_mask(keys, units, self.p).to(like.dtype) / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site!r}"
