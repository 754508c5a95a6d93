"""AdamW in one pass over each parameter group's shard (kernels/optim/fused_adamw.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from echelon.kernels import dispatch
from echelon.kernels.optim import fused_adamw
from echelon.layout.collective import Collective
from echelon.optim.flat_segments import FlatSegment
from echelon.optim.optimizer_state import OptimizerState, segment_counts, segment_states
from echelon.optim.param_shards import update_dtype
from echelon.optim.update_rule import UpdateRule, resolve_betas


class FusedAdamW:
    """AdamW whose step count is on the device: steps without targets do not count, and the host need not know."""

    def __init__(self, segments: Sequence[FlatSegment], rule: UpdateRule, device: torch.device):
        self.rule, self._segments, self._device = rule, segments, device
        self._dtype = update_dtype(segments[0].param_group) if segments else torch.float32
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._constants = torch.tensor([*resolve_betas(rule), rule.eps], dtype=torch.float64, device=device)
        self._moments: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._step += do_update
        distinct = dict.fromkeys((segment.lr_factor, segment.weight_decay) for segment in self._segments)
        constants = {
            settings: fused_adamw.step_constants(
                self._constants, lr * settings[0], settings[1], self._step, grad_scale, do_update, self._dtype
            )
            for settings in distinct
        }
        self._init_state()
        update = adamw_update_for(self._device, self._dtype)
        for segment, (exp_avg, exp_avg_sq) in zip(self._segments, self._moments, strict=True):
            high, low = segment.weights
            step_constants = constants[segment.lr_factor, segment.weight_decay]
            update(
                high,
                low,
                exp_avg,
                exp_avg_sq,
                segment.gradient,
                step_constants,
                self._step,
                num_decayed=segment.num_decayed,
                indices=segment.indices,
            )

    def _init_state(self) -> None:
        if not self._moments:
            dtype = torch.bfloat16 if self.rule.states == "bfloat16" else self._dtype
            self._moments = [(segment.zeros(dtype), segment.zeros(dtype)) for segment in self._segments]

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        yield from segment_counts("step", self._segments, self._step)
        yield from segment_states("mean", self._segments, [exp_avg for exp_avg, _ in self._moments])
        yield from segment_states("square", self._segments, [exp_avg_sq for _, exp_avg_sq in self._moments])

    def states(self) -> list[Tensor]:
        return [self._step, *(moment for pair in self._moments for moment in pair)]

    def collectives(self) -> list[Collective]:
        return []


def adamw_update_for(device: torch.device, dtype: torch.dtype) -> Callable[..., None]:
    """Return the Triton update on a GPU, plain torch elsewhere."""
    if dispatch.use_triton_update(device, dtype):
        from echelon.kernels.optim.fused_adamw_triton import update

        return update
    return fused_adamw.update
