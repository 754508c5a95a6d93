"""AdamW with both moments in 8 bits (blockwise.py): 2 bytes and 2/64 an element.

The rule is AdamW's (kernels/optim/fused_adamw.py). A step reads the moments, updates them, uses them as they are, and then keeps
them in 8 bits: m with a sign, v without. A block is of one parameter and of one rank's part of it, so other layouts
have other blocks, and differ by what 8 bits cannot hold. Parameters below 4096 elements keep float32.

One kernel on a GPU (kernels/optim/adamw_int8_triton.py), plain torch elsewhere; they agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.kernels import dispatch
from echelon.kernels.optim import fused_adamw
from echelon.kernels.optim.fused_adamw import LIVE, Place
from echelon.kernels.optim.split_fp32 import joined
from echelon.layout.collective import Collective
from echelon.optim.blockwise_quantization import Blocks
from echelon.optim.cost import BLOCK
from echelon.optim.optimizer_protocol import Update
from echelon.optim.optimizer_state import Kept, number_of_held
from echelon.optim.param_shards import CHUNK, Held
from echelon.optim.update_rule import Rule, betas_of

assert CHUNK % BLOCK == 0


class AdamW8:
    """`beside` is the AdamW of what is too small."""

    def __init__(self, held: Sequence[Held], rule: Rule, device: torch.device, beside: Update):
        self._held, self._beside, self._device = held, beside, device
        self._dtype = held[0].exact if held else torch.float32
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._constants = torch.tensor([*betas_of(rule), rule.eps], dtype=torch.float64, device=device)
        self._moments: list[tuple[Blocks, Blocks]] = []

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        self._begin()
        self._step += live
        numbers = {
            (rate, decay): fused_adamw.numbers_of(
                self._constants, lr * rate, decay, self._step, scale, live, self._dtype
            )
            for rate, decay in dict.fromkeys((one.lr, one.decay) for one in self._held)
        }
        for one, moments in zip(self._held, self._moments, strict=True):
            place = one.chance.place if one.chance else Place()
            gradient = one.unit.grad[one.everything]
            update(*one.weights, *moments, gradient, numbers[one.lr, one.decay], self._step, place)
        self._beside.step(lr, scale, live)

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


def update(
    high: Tensor,
    low: Tensor | None,
    mean: Blocks,
    square: Blocks,
    gradient: Tensor,
    numbers: Tensor,
    step: Tensor,
    place: Place,
) -> None:
    """As kernels/optim/fused_adamw.py's, of elements that all decay as `numbers` say."""
    if dispatch.updates(high.device, numbers.dtype):
        from echelon.kernels.optim import adamw_int8_triton

        moments = (mean.tensors, square.tensors)
        adamw_int8_triton.update(high, low, *moments, gradient, numbers, step, each=BLOCK, place=place)
        return
    for start in range(0, len(high), CHUNK):
        part = slice(start, min(start + CHUNK, len(high)))
        rest = None if low is None else low[part]
        _update_chunk(high[part], rest, mean, square, part, gradient[part], numbers, step, place.after(start))


def _update_chunk(
    high: Tensor,
    low: Tensor | None,
    mean: Blocks,
    square: Blocks,
    part: slice,
    gradient: Tensor,
    numbers: Tensor,
    step: Tensor,
    place: Place,
) -> None:
    dtype, live = numbers.dtype, numbers[LIVE] != 0
    before = high.to(dtype) if low is None else joined(high, low)
    w, m, v = fused_adamw.moved(before, mean.read(part, dtype), square.read(part, dtype), gradient, numbers)
    rounded = low is None and high.dtype != dtype
    bits = fused_adamw.random_bits(len(high), place, step) if rounded else None
    fused_adamw.write_weights(high, low, torch.where(live, w, before), bits)
    mean.write(part, m, live)
    square.write(part, v, live)
