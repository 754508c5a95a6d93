"""torch's own optimizer on flat shards: its fused kernels. The host reads scale and skip, which a CPU has at hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.optimizer_groups import ParamSettings
from echelon.optim.optimizer_state import OptimizerState, count_state, states_of_segment
from echelon.optim.param_shards import FlatSegment
from echelon.optim.torch_rules import torch_optimizer_for
from echelon.optim.update_rule import UpdateRule, resolve_momentum
from echelon.parallel.dp.param_group import ParamGroup

STATE_NAMES = {"exp_avg": "mean", "exp_avg_sq": "square", "momentum_buffer": "momentum"}
"""torch's names of states, and ours"""


@dataclass
class _TorchParam:
    """A run of one unit that decays, or does not."""

    segment: FlatSegment
    shard_slice: slice
    """in the shard of the unit"""
    settings: ParamSettings
    values: Tensor
    grad_buffer: Tensor | None = None
    """the unit's gradients, of which `values.grad` is a part"""

    @property
    def param_group(self) -> ParamGroup:
        return self.segment.param_group

    def attach_gradient(self) -> Tensor:
        if self.grad_buffer is not self.param_group.grad:
            self.grad_buffer = self.param_group.grad
            self.values.grad = self.grad_buffer[self.shard_slice]
        assert self.values.grad is not None
        return self.values.grad

    def release_gradient(self) -> None:
        if self.param_group.lazy_grads:
            self.grad_buffer = self.values.grad = None


class TorchOptimizer:
    """Masters that are one tensor."""

    def __init__(self, segments: Sequence[FlatSegment], rule: UpdateRule):
        self._params: list[_TorchParam] = []
        for run in segments:
            for begin, end, decay in ((0, run.num_decayed, run.weight_decay), (run.num_decayed, run.size, 0.0)):
                where = slice(run.start + begin, run.start + end)
                if begin < end:
                    values = run.param_group.master.values(where)
                    self._params.append(_TorchParam(run, where, ParamSettings(run.lr_factor, decay), values))
        self._params.sort(key=lambda part: not part.settings.weight_decay)
        given = [(part.values, part.settings) for part in self._params]
        self._momentum = resolve_momentum(rule)
        self._torch_optimizer = torch_optimizer_for(rule, given, fused=True) if self._params else None

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        if self._torch_optimizer is None or not do_update:
            return
        factor = float(grad_scale)
        for part in self._params:
            gradient = part.attach_gradient()
            if factor != 1.0:
                gradient.mul_(factor)
        for group in self._torch_optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        self._torch_optimizer.step()
        for part in self._params:
            part.release_gradient()

    def _init_state(self) -> None:
        """States as torch makes them in its first step."""
        if self._torch_optimizer is None or self._torch_optimizer.state:
            return
        for part in self._params:
            state = self._torch_optimizer.state[part.values]
            if isinstance(self._torch_optimizer, torch.optim.AdamW):
                state["step"] = torch.zeros((), dtype=torch.float32, device=part.values.device)
                state["exp_avg"] = torch.zeros_like(part.values)
                state["exp_avg_sq"] = torch.zeros_like(part.values)
            elif self._momentum:
                state["momentum_buffer"] = torch.zeros_like(part.values)

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        for part in self._params if self._torch_optimizer is not None else ():
            assert self._torch_optimizer is not None
            state = self._torch_optimizer.state[part.values]
            for name, kind in STATE_NAMES.items():
                if (tensor := state.get(name)) is not None:
                    found = list(states_of_segment(kind, part.segment, part.shard_slice.start, tensor))
                    yield from found
                    if name == "exp_avg":
                        yield from (count_state("step", one.param_group, one.piece, state["step"]) for one in found)

    def states(self) -> list[Tensor]:
        state = {} if self._torch_optimizer is None else self._torch_optimizer.state
        return [value for values in state.values() for value in values.values() if torch.is_tensor(value)]

    def collectives(self) -> list[Collective]:
        return []
