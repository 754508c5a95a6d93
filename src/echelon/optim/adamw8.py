"""AdamW with both moments in 8 bits (blockwise.py): 2 bytes and 2/64 an element.

The rule is AdamW's (kernels/adamw.py). A step reads the moments, updates them, uses them as they are, and then keeps
them in 8 bits: m with a sign, v without. A block is of one parameter and of one rank's part of it, so other layouts
have other blocks, and differ by what 8 bits cannot hold. Parameters below 4096 elements keep float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.layout.cost import Collective
from echelon.optim.blockwise import Blocks
from echelon.optim.cost import BLOCK
from echelon.optim.held import CHUNK, Held
from echelon.optim.kept import Kept, number_of_held
from echelon.optim.rule import Rule, betas_of
from echelon.optim.update import Update

assert CHUNK % BLOCK == 0


class AdamW8:
    """`beside` is the AdamW of what is too small."""

    def __init__(self, held: Sequence[Held], rule: Rule, device: torch.device, beside: Update):
        self._held, self._betas, self._eps, self._beside = held, betas_of(rule), rule.eps, beside
        self._device = device
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._moments: list[tuple[Blocks, Blocks]] = []

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        self._begin()
        self._step += live
        corrections = [1 - beta ** self._step.clamp(min=1).double() for beta in self._betas]
        for one, moments in zip(self._held, self._moments, strict=True):
            for start in range(0, one.size, CHUNK):
                part = slice(start, min(start + CHUNK, one.size))
                self._update(one, moments, part, lr * one.lr, corrections, scale, live)
        self._beside.step(lr, scale, live)

    def _update(
        self,
        one: Held,
        moments: tuple[Blocks, Blocks],
        part: slice,
        lr: float,
        corrections: Sequence[Tensor],
        scale: Tensor,
        live: Tensor,
    ) -> None:
        first = one.piece.shard_offset
        where = slice(first + part.start, first + part.stop)
        before = one.read(part.start, part.stop)
        dtype = before.dtype
        g = one.unit.grad[where].to(dtype) * scale.to(dtype)
        mean, square = (
            blocks.read(part, dtype) * beta + new * (1 - beta)
            for blocks, beta, new in zip(moments, self._betas, (g, g.square()), strict=True)
        )
        towards = (mean / corrections[0].to(dtype)) / ((square / corrections[1].to(dtype)).sqrt() + self._eps)
        after = before * (1 - lr * one.decay) - towards * lr
        one.write(part.start, torch.where(live, after, before))
        for blocks, numbers in zip(moments, (mean, square), strict=True):
            blocks.write(part, numbers, live)

    def _begin(self) -> None:
        if not self._moments:
            self._moments = [
                (
                    Blocks(one.size, signed=True, device=self._device),
                    Blocks(one.size, signed=False, device=self._device),
                )
                for one in self._held
            ]

    def kept(self) -> Iterator[Kept]:
        """Codes, and for each element the largest of its block: other layouts have other blocks."""
        self._begin()
        yield from number_of_held("step", self._held, self._step)
        for one, pair in zip(self._held, self._moments, strict=True):
            for kind, blocks in zip(("mean", "square"), pair, strict=True):
                codes = Kept(
                    f"{kind}_codes", one.unit, one.piece, "elements", torch.uint8, blocks.read_codes, blocks.keep_codes
                )
                yield codes
                yield Kept(
                    f"{kind}_largest", one.unit, one.piece, "elements", torch.float32, blocks.spread, blocks.rescale
                )
        yield from self._beside.kept()

    def states(self) -> list[Tensor]:
        found = [tensor for pair in self._moments for blocks in pair for tensor in (blocks.codes, blocks.largest)]
        return [self._step, *found, *self._beside.states()]

    def collectives(self) -> list[Collective]:
        return []
