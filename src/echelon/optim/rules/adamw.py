"""AdamW in one pass over each parameter group's shard (kernels/optim/fused_adamw.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from echelon.kernels import dispatch
from echelon.kernels.optim import fused_adamw
from echelon.optim.flat_segments import FlatSegment
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState, segment_counts, segment_states
from echelon.optim.param_shards import ShardRange
from echelon.optim.update_rule import UpdateRule, resolve_betas


class AdamWStep:
    """AdamW's step count and constants, on the device: the host need not know which steps have no targets."""

    def __init__(self, ranges: Sequence[ShardRange], rule: UpdateRule, device: torch.device):
        self.dtype = ranges[0].update_dtype if ranges else torch.float32
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._betas_eps = torch.tensor([*resolve_betas(rule), rule.eps], dtype=torch.float64, device=device)
        self._settings = dict.fromkeys((each.lr_factor, each.weight_decay) for each in ranges)

    def advance(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> dict[tuple[float, float], Tensor]:
        """Count the step; return the kernels' constants by (lr_factor, weight_decay)."""
        self.count += do_update
        return {
            (lr_factor, decay): fused_adamw.step_constants(
                self._betas_eps, lr * lr_factor, decay, self.count, grad_scale, do_update, self.dtype
            )
            for lr_factor, decay in self._settings
        }


class FusedAdamW(ShardedOptimizer):
    """AdamW on flat segments."""

    def __init__(self, segments: Sequence[FlatSegment], rule: UpdateRule, device: torch.device):
        self.rule, self._segments, self._device = rule, segments, device
        self._step = AdamWStep(segments, rule, device)
        self._moments: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._init_state()
        constants = self._step.advance(lr, grad_scale, do_update)
        update = adamw_update_for(self._device, self._step.dtype)
        for segment, moments in zip(self._segments, self._moments, strict=True):
            segment_constants = constants[segment.lr_factor, segment.weight_decay]
            tensors = (*segment.weights, *moments, segment.gradient, segment_constants, self._step.count)
            update(*tensors, num_decayed=segment.num_decayed, indices=segment.indices)

    def _init_state(self) -> None:
        if not self._moments:
            dtype = torch.bfloat16 if self.rule.states == "bfloat16" else self._step.dtype
            self._moments = [(segment.zeros(dtype), segment.zeros(dtype)) for segment in self._segments]

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        yield from segment_counts("step", self._segments, self._step.count)
        yield from segment_states("mean", self._segments, [exp_avg for exp_avg, _ in self._moments])
        yield from segment_states("square", self._segments, [exp_avg_sq for _, exp_avg_sq in self._moments])

    def states(self) -> list[Tensor]:
        return [self._step.count, *(moment for pair in self._moments for moment in pair)]


def adamw_update_for(device: torch.device, dtype: torch.dtype) -> Callable[..., None]:
    """Return the Triton update on a GPU, plain torch elsewhere."""
    if dispatch.use_triton_update(device, dtype):
        from echelon.kernels.optim.fused_adamw_triton import update

        return update
    return fused_adamw.update
