"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2).

    m = beta1 m + (1 - beta1) g                   v = beta2 v + (1 - beta2) g g
    r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + decay w
    w = w - lr (|w| / |r|) r

The norms are of one matrix (of a stack of experts, of each), and the ratio is 1 where one of them is 0. Vectors move by
lr r, as in the authors' own program. One message a step sums both norms of all matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.matrix_shards import MatrixRectangle
from echelon.optim.optimizer_state import OptimizerState, element_state, shard_counts
from echelon.optim.param_shards import ParamShard
from echelon.optim.reduced_stats import ReducedStats
from echelon.optim.update_rule import UpdateRule, resolve_betas


class LAMB:
    def __init__(self, shards: Sequence[ParamShard], rule: UpdateRule, device: torch.device):
        self._shards, self._betas, self._eps = shards, resolve_betas(rule), rule.eps
        self._matrices = [one for one in shards if len(one.entry.shape) > 1]
        self._norm_stats = ReducedStats(self._matrices, [2 * one.stack.num_matrices for one in self._matrices])
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._moments: dict[ParamShard, tuple[Tensor, Tensor]] = {}
        self._constants = torch.empty(0)
        """of this step: both corrections, and eps"""

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._step += do_update
        like = self._shards[0].update_dtype if self._shards else torch.float32
        step = self._step.clamp(min=1).double()
        corrections = [1 - beta**step for beta in self._betas]
        eps = torch.full_like(step, self._eps)
        self._constants = torch.stack([*corrections, eps]).to(like)
        self._init_state()
        squares = self._norm_stats.zeros()
        for one in self._shards:
            for part in one.rectangles:
                found = self._update_moments(one, part, grad_scale, do_update)
                if len(one.entry.shape) > 1 and one.piece.counts_in_stage:
                    self._norm_stats.view(squares, one).view(2, -1)[:, part.matrix_index] += found
        self._norm_stats.all_reduce(squares)
        for one in self._shards:
            rates = torch.full((1,), lr * one.lr_factor, dtype=squares.dtype, device=squares.device)
            if len(one.entry.shape) > 1:
                weights, towards = self._norm_stats.view(squares, one).view(2, -1).sqrt()
                rates = torch.where((weights > 0) & (towards > 0), weights / towards, 1.0) * (lr * one.lr_factor)
            for part in one.rectangles:
                self._apply(one, part, rates[part.matrix_index], do_update)

    def _update_moments(self, one: ParamShard, part: MatrixRectangle, scale: Tensor, live: Tensor) -> Tensor:
        """The new moments; gives the sums of squares of the weights, and of where they move. Padding is 0."""
        mean, square = (state[part.start : part.stop] for state in self._moments[one])
        if one.use_triton:
            from echelon.kernels.optim import lamb_triton

            high, low = one.rectangle_weights(part)
            gradient = one.param_group.grad[one.rectangle_slice(part)]
            return lamb_triton.update_moments(
                *(high, low, mean, square, gradient, scale, live, self._constants),
                weight_decay=one.weight_decay,
                betas=self._betas,
            )
        g = one.scaled_gradient(part, scale).view(-1)
        for moment, beta, new in zip((mean, square), self._betas, (g, g.square()), strict=True):
            moment.copy_(torch.where(live, moment * beta + new * (1 - beta), moment))
        before = one.read_range(part.start, part.stop)
        return torch.stack([before.square().sum(), self._update_direction(one, part, before).square().sum()])

    def _apply(self, one: ParamShard, part: MatrixRectangle, rate: Tensor, live: Tensor) -> None:
        if one.use_triton:
            from echelon.kernels.optim import lamb_triton

            (high, low), (step, place) = one.rectangle_weights(part), one.rounding_args(part)
            mean, square = (state[part.start : part.stop] for state in self._moments[one])
            lamb_triton.apply_update(
                high, low, mean, square, live, self._constants, rate, step, weight_decay=one.weight_decay, indices=place
            )
            return
        before = one.read_range(part.start, part.stop)
        after = before - self._update_direction(one, part, before) * rate
        one.write_range(part.start, torch.where(live, after, before))

    def _update_direction(self, one: ParamShard, part: MatrixRectangle, weights: Tensor) -> Tensor:
        mean, square = (state[part.start : part.stop] for state in self._moments[one])
        found: Tensor = (mean / self._constants[0]) / ((square / self._constants[1]).sqrt() + self._eps)
        return found + weights * one.weight_decay if one.weight_decay else found

    def _init_state(self) -> None:
        if not self._moments:
            self._moments = {one: (one.zeros(), one.zeros()) for one in self._shards}

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        yield from shard_counts("step", self._shards, self._step)
        for one, moments in self._moments.items():
            for kind, state in zip(("mean", "square"), moments, strict=True):
                yield element_state(kind, one.param_group, one.piece, state)

    def states(self) -> list[Tensor]:
        return [self._step, *(moment for pair in self._moments.values() for moment in pair)]

    def collectives(self) -> list[Collective]:
        return self._norm_stats.collectives("norms of weights and updates")
