"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2).

    m = beta1 m + (1 - beta1) g                   v = beta2 v + (1 - beta2) g g
    r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + decay w
    w = w - lr (|w| / |r|) r

Norms are per matrix (per expert in a stack), and the trust ratio is 1 where one of them is 0. Vectors move by lr r, as
in the authors' code. One all-reduce per step sums both norms of all matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.matrix_shards import MatrixRectangle
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState, element_state, shard_counts
from echelon.optim.param_shards import ParamShard
from echelon.optim.reduced_stats import ReducedStats
from echelon.optim.update_rule import UpdateRule, resolve_betas


class LAMB(ShardedOptimizer):
    """LAMB with matrix norms all-reduced over the ranks that share a matrix."""

    def __init__(self, shards: Sequence[ParamShard], rule: UpdateRule, device: torch.device):
        self._shards, self._betas, self._eps = shards, resolve_betas(rule), rule.eps
        self._matrices = [shard for shard in shards if len(shard.param.shape) > 1]
        self._norm_stats = ReducedStats(
            self._matrices, [2 * shard.stack.num_matrices for shard in self._matrices], device
        )
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._moments: dict[ParamShard, tuple[Tensor, Tensor]] = {}
        self._constants = torch.empty(0)
        """of this step: both bias corrections, and eps"""

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._step += do_update
        dtype = self._shards[0].update_dtype if self._shards else torch.float32
        step = self._step.clamp(min=1).double()
        corrections = [1 - beta**step for beta in self._betas]
        eps = torch.full_like(step, self._eps)
        self._constants = torch.stack([*corrections, eps]).to(dtype)
        self._init_state()
        squares = self._norm_stats.zeros()
        for shard in self._shards:
            for rectangle in shard.rectangles:
                sums = self._update_moments(shard, rectangle, grad_scale, do_update)
                if len(shard.param.shape) > 1 and shard.piece.counts_in_stage:
                    self._norm_stats.view(squares, shard).view(2, -1)[:, rectangle.matrix_index] += sums
        self._norm_stats.all_reduce(squares)
        for shard in self._shards:
            # Of this dtype, not of the norms: a parameter group without a matrix has none.
            rates = torch.full((1,), lr * shard.lr_factor, dtype=dtype, device=self._step.device)
            if len(shard.param.shape) > 1:
                weight_norm, update_norm = self._norm_stats.view(squares, shard).view(2, -1).sqrt()
                trust_ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
                rates = trust_ratio * (lr * shard.lr_factor)
            for rectangle in shard.rectangles:
                self._apply(shard, rectangle, rates[rectangle.matrix_index], do_update)

    def _update_moments(
        self, shard: ParamShard, rectangle: MatrixRectangle, grad_scale: Tensor, do_update: Tensor
    ) -> Tensor:
        """Update the moments; return the sums of squares of weights and update direction. Padding is 0."""
        exp_avg, exp_avg_sq = self._rectangle_moments(shard, rectangle)
        if shard.use_triton:
            from echelon.kernels.optim.elementwise_updates_triton import lamb_update_moments

            weights, gradient = shard.rectangle_weights(rectangle), shard.rectangle_gradient(rectangle)
            tensors = (*weights, exp_avg, exp_avg_sq, gradient, grad_scale, do_update, self._constants)
            return lamb_update_moments(*tensors, weight_decay=shard.weight_decay, betas=self._betas)
        g = shard.scaled_gradient(rectangle, grad_scale).view(-1)
        for moment, beta, new in zip((exp_avg, exp_avg_sq), self._betas, (g, g.square()), strict=True):
            moment.copy_(torch.where(do_update, moment * beta + new * (1 - beta), moment))
        before = shard.read(rectangle.elements)
        return torch.stack([before.square().sum(), self._update_direction(shard, rectangle, before).square().sum()])

    def _apply(self, shard: ParamShard, rectangle: MatrixRectangle, rate: Tensor, do_update: Tensor) -> None:
        if shard.use_triton:
            from echelon.kernels.optim.elementwise_updates_triton import lamb_apply_update

            step, indices = shard.rounding_args(rectangle)
            weights, moments = shard.rectangle_weights(rectangle), self._rectangle_moments(shard, rectangle)
            tensors = (*weights, *moments, do_update, self._constants, rate, step)
            lamb_apply_update(*tensors, weight_decay=shard.weight_decay, indices=indices)
            return
        before = shard.read(rectangle.elements)
        after = before - self._update_direction(shard, rectangle, before) * rate
        shard.write(rectangle.elements, torch.where(do_update, after, before))

    def _update_direction(self, shard: ParamShard, rectangle: MatrixRectangle, weights: Tensor) -> Tensor:
        exp_avg, exp_avg_sq = self._rectangle_moments(shard, rectangle)
        direction: Tensor = (exp_avg / self._constants[0]) / ((exp_avg_sq / self._constants[1]).sqrt() + self._eps)
        return direction + weights * shard.weight_decay if shard.weight_decay else direction

    def _rectangle_moments(self, shard: ParamShard, rectangle: MatrixRectangle) -> tuple[Tensor, Tensor]:
        exp_avg, exp_avg_sq = self._moments[shard]
        return exp_avg[rectangle.elements], exp_avg_sq[rectangle.elements]

    def _init_state(self) -> None:
        if not self._moments:
            self._moments = {shard: (shard.zeros(), shard.zeros()) for shard in self._shards}

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        yield from shard_counts("step", self._shards, self._step)
        for shard, moments in self._moments.items():
            for name, state in zip(("mean", "square"), moments, strict=True):
                yield element_state(name, shard.param_group, shard.piece, state)

    def states(self) -> list[Tensor]:
        return [self._step, *(moment for pair in self._moments.values() for moment in pair)]

    def collectives(self) -> list[Collective]:
        return self._norm_stats.collectives("norms of weights and updates")
