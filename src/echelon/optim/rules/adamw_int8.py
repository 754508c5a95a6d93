"""AdamW with both moments in int8 (blockwise_quantization.py): 2 bytes and 2/64 per element.

The rule is AdamW's (kernels/optim/fused_adamw.py). A step dequantizes the moments, updates them, uses them unrounded,
and quantizes them again: m with a sign, v without. Blocks are within one rank's piece of one parameter, so layouts have
different blocks, and differ by the quantization error. Parameters below 4096 elements keep float32 moments.

One kernel on a GPU (kernels/optim/fused_adamw_triton.py), plain torch elsewhere; they agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.kernels import dispatch
from echelon.kernels.optim import fused_adamw
from echelon.kernels.optim.fused_adamw import DO_UPDATE
from echelon.kernels.optim.split_fp32 import join_halves
from echelon.kernels.optim.stochastic_round import ElementIndices, random_bits
from echelon.layout.collective import Collective
from echelon.optim.blockwise_quantization import BlockQuantizedState
from echelon.optim.cost import QUANTIZATION_BLOCK
from echelon.optim.flat_segments import CHUNK_NUMEL
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState, shard_counts
from echelon.optim.param_shards import ParamShard
from echelon.optim.update_rule import UpdateRule, resolve_betas

assert CHUNK_NUMEL % QUANTIZATION_BLOCK == 0


class AdamWInt8:
    """AdamW with int8 moments; `small_params` updates the parameters below the minimum size."""

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
        constants = {
            (lr_factor, decay): fused_adamw.step_constants(
                self._constants, lr * lr_factor, decay, self._step, grad_scale, do_update, self._dtype
            )
            for lr_factor, decay in dict.fromkeys((shard.lr_factor, shard.weight_decay) for shard in self._shards)
        }
        for shard, moments in zip(self._shards, self._moments, strict=True):
            indices = shard.rounding.indices if shard.rounding else ElementIndices()
            gradient = shard.param_group.grad[shard.shard_slice]
            update(
                *shard.weights, *moments, gradient, constants[shard.lr_factor, shard.weight_decay], self._step, indices
            )
        self._small_params.step(lr, grad_scale, do_update)

    def _init_state(self) -> None:
        if not self._moments:
            self._moments = [
                (
                    BlockQuantizedState(shard.size, signed=True, device=self._device),
                    BlockQuantizedState(shard.size, signed=False, device=self._device),
                )
                for shard in self._shards
            ]

    def named_states(self) -> Iterator[OptimizerState]:
        """Yield codes, and the block maximum of every element: other layouts have other blocks."""
        self._init_state()
        yield from shard_counts("step", self._shards, self._step)
        for shard, pair in zip(self._shards, self._moments, strict=True):
            for name, blocks in zip(("mean", "square"), pair, strict=True):
                codes = OptimizerState(
                    f"{name}_codes",
                    shard.param_group,
                    shard.piece,
                    "elements",
                    torch.uint8,
                    blocks.read_codes,
                    blocks.write_codes,
                )
                yield codes
                yield OptimizerState(
                    f"{name}_largest",
                    shard.param_group,
                    shard.piece,
                    "elements",
                    torch.float32,
                    blocks.read_amax,
                    blocks.write_amax,
                )
        yield from self._small_params.named_states()

    def states(self) -> list[Tensor]:
        quantized = [
            tensor for pair in self._moments for blocks in pair for tensor in (blocks.codes, blocks.block_amax)
        ]
        return [self._step, *quantized, *self._small_params.states()]

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
    """Update as `fused_adamw.update`, with one weight decay for all elements."""
    if dispatch.use_triton_update(high.device, constants.dtype):
        from echelon.kernels.optim.fused_adamw_triton import update_int8

        moments = (exp_avg.tensors, exp_avg_sq.tensors)
        update_int8(high, low, *moments, gradient, constants, step, block_size=QUANTIZATION_BLOCK, indices=indices)
        return
    for start in range(0, len(high), CHUNK_NUMEL):
        chunk = slice(start, min(start + CHUNK_NUMEL, len(high)))
        low_chunk = None if low is None else low[chunk]
        _update_chunk(
            high[chunk], low_chunk, exp_avg, exp_avg_sq, chunk, gradient[chunk], constants, step, indices.advance(start)
        )


def _update_chunk(
    high: Tensor,
    low: Tensor | None,
    exp_avg: BlockQuantizedState,
    exp_avg_sq: BlockQuantizedState,
    chunk: slice,
    gradient: Tensor,
    constants: Tensor,
    step: Tensor,
    indices: ElementIndices,
) -> None:
    dtype, do_update = constants.dtype, constants[DO_UPDATE] != 0
    before = high.to(dtype) if low is None else join_halves(high, low)
    w, m, v = fused_adamw.adamw_step(
        before, exp_avg.read(chunk, dtype), exp_avg_sq.read(chunk, dtype), gradient, constants
    )
    rounded = low is None and high.dtype != dtype
    bits = random_bits(len(high), indices, step) if rounded else None
    fused_adamw.write_weights(high, low, torch.where(do_update, w, before), bits)
    exp_avg.write(chunk, m, do_update)
    exp_avg_sq.write(chunk, v, do_update)
