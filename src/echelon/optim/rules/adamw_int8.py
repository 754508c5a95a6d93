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
from echelon.kernels.optim.fused_adamw import DO_UPDATE
from echelon.kernels.optim.stochastic_round import ElementIndices, random_bits
from echelon.kernels.optim.split_fp32 import join_halves
from echelon.layout.collective import Collective
from echelon.optim.blockwise_quantization import BlockQuantizedState
from echelon.optim.cost import QUANTIZATION_BLOCK
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState, shard_counts
from echelon.optim.param_shards import CHUNK_NUMEL, ParamShard
from echelon.optim.update_rule import UpdateRule, resolve_betas

assert CHUNK_NUMEL % QUANTIZATION_BLOCK == 0


class AdamWInt8:
    """`beside` is the AdamW of what is too small."""

    def __init__(
        self, shards: Sequence[ParamShard], rule: UpdateRule, device: torch.device, small_params: ShardedOptimizer
    ):
        self._shards, self._small_params, self._device = shards, small_params, device
        self._dtype = shards[0].update_dtype if shards else torch.float32
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._constants = torch.tensor([*resolve_betas(rule), rule.eps], dtype=torch.float64, device=device)
        self._moments: list[tuple[BlockQuantizedState, BlockQuantizedState]] = []

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._init_state()
        self._step += do_update
        numbers = {
            (rate, decay): fused_adamw.step_constants(
                self._constants, lr * rate, decay, self._step, grad_scale, do_update, self._dtype
            )
            for rate, decay in dict.fromkeys((one.lr_factor, one.weight_decay) for one in self._shards)
        }
        for one, moments in zip(self._shards, self._moments, strict=True):
            place = one.rounding.indices if one.rounding else ElementIndices()
            gradient = one.param_group.grad[one.shard_slice]
            update(*one.weights, *moments, gradient, numbers[one.lr_factor, one.weight_decay], self._step, place)
        self._small_params.step(lr, grad_scale, do_update)

    def _init_state(self) -> None:
        if not self._moments:
            self._moments = [
                (
                    BlockQuantizedState(one.size, signed=True, device=self._device),
                    BlockQuantizedState(one.size, signed=False, device=self._device),
                )
                for one in self._shards
            ]

    def named_states(self) -> Iterator[OptimizerState]:
        """Codes, and for each element the largest of its block: other layouts have other blocks."""
        self._init_state()
        yield from shard_counts("step", self._shards, self._step)
        for one, pair in zip(self._shards, self._moments, strict=True):
            for kind, blocks in zip(("mean", "square"), pair, strict=True):
                codes = OptimizerState(
                    f"{kind}_codes",
                    one.param_group,
                    one.piece,
                    "elements",
                    torch.uint8,
                    blocks.read_codes,
                    blocks.write_codes,
                )
                yield codes
                yield OptimizerState(
                    f"{kind}_largest",
                    one.param_group,
                    one.piece,
                    "elements",
                    torch.float32,
                    blocks.read_amax,
                    blocks.write_amax,
                )
        yield from self._small_params.named_states()

    def states(self) -> list[Tensor]:
        found = [tensor for pair in self._moments for blocks in pair for tensor in (blocks.codes, blocks.block_amax)]
        return [self._step, *found, *self._small_params.states()]

    def collectives(self) -> list[Collective]:
        return []


def update(
    high: Tensor,
    low: Tensor | None,
    exp_avg: BlockQuantizedState,
    exp_avg_sq: BlockQuantizedState,
    gradient: Tensor,
    constants: Tensor,
    step: Tensor,
    indices: ElementIndices,
) -> None:
    """As kernels/optim/fused_adamw.py's, of elements that all decay as `numbers` say."""
    if dispatch.use_triton_update(high.device, constants.dtype):
        from echelon.kernels.optim import adamw_int8_triton

        moments = (exp_avg.tensors, exp_avg_sq.tensors)
        adamw_int8_triton.update(
            high, low, *moments, gradient, constants, step, block_size=QUANTIZATION_BLOCK, indices=indices
        )
        return
    for start in range(0, len(high), CHUNK_NUMEL):
        part = slice(start, min(start + CHUNK_NUMEL, len(high)))
        rest = None if low is None else low[part]
        _update_chunk(
            high[part], rest, exp_avg, exp_avg_sq, part, gradient[part], constants, step, indices.advance(start)
        )


def _update_chunk(
    high: Tensor,
    low: Tensor | None,
    exp_avg: BlockQuantizedState,
    exp_avg_sq: BlockQuantizedState,
    part: slice,
    gradient: Tensor,
    constants: Tensor,
    step: Tensor,
    indices: ElementIndices,
) -> None:
    dtype, live = constants.dtype, constants[DO_UPDATE] != 0
    before = high.to(dtype) if low is None else join_halves(high, low)
    w, m, v = fused_adamw.adamw_step(
        before, exp_avg.read(part, dtype), exp_avg_sq.read(part, dtype), gradient, constants
    )
    rounded = low is None and high.dtype != dtype
    bits = random_bits(len(high), indices, step) if rounded else None
    fused_adamw.write_weights(high, low, torch.where(live, w, before), bits)
    exp_avg.write(part, m, live)
    exp_avg_sq.write(part, v, live)
