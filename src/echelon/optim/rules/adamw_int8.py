"""AdamW with both moments in int8 (blockwise_quantization.py): 2 bytes and 2/64 per element.

The rule is AdamW's (kernels/optim/fused_adamw.py). A step dequantizes the moments, updates them, uses them unrounded,
and quantizes them again: m with a sign, v without. Blocks are within one rank's piece of one parameter, so layouts have
different blocks, and differ by the quantization error. Parameters below 4096 elements keep float32 moments.

One kernel on a GPU (kernels/optim/fused_adamw_triton.py), plain torch elsewhere; they agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from echelon.kernels import dispatch
from echelon.kernels.optim import fused_adamw
from echelon.kernels.optim.fused_adamw import DO_UPDATE
from echelon.kernels.optim.split_fp32 import join_halves
from echelon.kernels.optim.stochastic_round import ElementIndices, random_bits
from echelon.optim.blockwise_quantization import BlockQuantizedState
from echelon.optim.cost import QUANTIZATION_BLOCK
from echelon.optim.flat_segments import CHUNK_NUMEL
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState, shard_counts
from echelon.optim.param_shards import ParamShard
from echelon.optim.rules.adamw import AdamWStep
from echelon.optim.update_rule import UpdateRule

assert CHUNK_NUMEL % QUANTIZATION_BLOCK == 0


class AdamWInt8(ShardedOptimizer):
    """AdamW with int8 moments; `small_params` updates the parameters below the minimum size."""

    def __init__(
        self, shards: Sequence[ParamShard], rule: UpdateRule, device: torch.device, small_params: ShardedOptimizer
    ):
        self._shards, self._small_params, self._device = shards, small_params, device
        self._step = AdamWStep(shards, rule, device)
        self._moments: list[tuple[BlockQuantizedState, BlockQuantizedState]] = []

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._init_state()
        constants = self._step.advance(lr, grad_scale, do_update)
        for shard, moments in zip(self._shards, self._moments, strict=True):
            indices = shard.rounding.indices if shard.rounding else ElementIndices()
            shard_constants = constants[shard.lr_factor, shard.weight_decay]
            update(*shard.weights, *moments, shard.gradient, shard_constants, self._step.count, indices)
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
        yield from shard_counts("step", self._shards, self._step.count)
        for shard, pair in zip(self._shards, self._moments, strict=True):
            state = partial(OptimizerState, param_group=shard.param_group, piece=shard.piece, form="elements")
            for name, blocks in zip(("mean", "square"), pair, strict=True):
                yield state(f"{name}_codes", dtype=torch.uint8, read=blocks.read_codes, write=blocks.write_codes)
                yield state(f"{name}_largest", dtype=torch.float32, read=blocks.read_amax, write=blocks.write_amax)
        yield from self._small_params.named_states()

    def states(self) -> list[Tensor]:
        moments = [moment for pair in self._moments for moment in pair]
        quantized = [tensor for moment in moments for tensor in (moment.codes, moment.block_amax)]
        return [self._step.count, *quantized, *self._small_params.states()]


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

        tensors = (high, low, exp_avg.tensors, exp_avg_sq.tensors, gradient, constants, step)
        update_int8(*tensors, block_size=QUANTIZATION_BLOCK, indices=indices)
        return
    dtype, do_update = constants.dtype, constants[DO_UPDATE] != 0
    for start in range(0, len(high), CHUNK_NUMEL):
        chunk = slice(start, min(start + CHUNK_NUMEL, len(high)))
        high_chunk, low_chunk = high[chunk], None if low is None else low[chunk]
        before = high_chunk.to(dtype) if low_chunk is None else join_halves(high_chunk, low_chunk)
        m, v = exp_avg.read(chunk, dtype), exp_avg_sq.read(chunk, dtype)
        w, m, v = fused_adamw.adamw_step(before, m, v, gradient[chunk], constants)
        rounded = low is None and high.dtype != dtype
        bits = random_bits(len(before), indices.advance(start), step) if rounded else None
        fused_adamw.write_weights(high_chunk, low_chunk, torch.where(do_update, w, before), bits)
        exp_avg.write(chunk, m, do_update)
        exp_avg_sq.write(chunk, v, do_update)
