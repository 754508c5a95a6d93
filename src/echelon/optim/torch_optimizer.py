"""Torch's fused AdamW and SGD on flat shards, for float32 and float64 on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.optim.flat_segments import FlatSegment
from echelon.optim.optimizer_groups import ParamSettings
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState, count_state, states_of_segment
from echelon.optim.torch_rules import torch_optimizer_for
from echelon.optim.update_rule import UpdateRule, resolve_momentum

STATE_NAMES = {"exp_avg": "mean", "exp_avg_sq": "square", "momentum_buffer": "momentum"}
"""torch's names of states to those in checkpoints"""


@dataclass
class _TorchParam:
    """The part of a segment with or without weight decay, as one parameter of torch's optimizer."""

    segment: FlatSegment
    shard_slice: slice
    """in the parameter group's shard"""
    settings: ParamSettings
    values: Tensor
    grad_buffer: Tensor | None = None
    """the group's gradients, of which `values.grad` is a view"""

    def attach_gradient(self) -> Tensor:
        """Make `values.grad` a view of the group's current gradients."""
        if self.grad_buffer is not self.segment.param_group.grad:
            self.grad_buffer = self.segment.param_group.grad
            self.values.grad = self.grad_buffer[self.shard_slice]
        assert self.values.grad is not None
        return self.values.grad

    def release_gradient(self) -> None:
        if self.segment.param_group.lazy_grads:
            self.grad_buffer = self.values.grad = None


class TorchOptimizer(ShardedOptimizer):
    """Torch's fused AdamW or SGD on master weights that are one tensor.

    The host reads `grad_scale` and `do_update`, which costs nothing on a CPU.
    """

    def __init__(self, segments: Sequence[FlatSegment], rule: UpdateRule):
        self._params: list[_TorchParam] = []
        for segment in segments:
            ranges = ((0, segment.num_decayed, segment.weight_decay), (segment.num_decayed, segment.size, 0.0))
            for begin, end, decay in ranges:
                where = slice(segment.start + begin, segment.start + end)
                if begin < end:
                    values = segment.param_group.master.values(where)
                    settings = ParamSettings(segment.lr_factor, decay)
                    self._params.append(_TorchParam(segment, where, settings, values))
        self._params.sort(key=lambda param: not param.settings.weight_decay)
        params = [(param.values, param.settings) for param in self._params]
        self._momentum = resolve_momentum(rule)
        self._torch_optimizer = torch_optimizer_for(rule, params, fused=True) if params else None

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        if self._torch_optimizer is None or not do_update:
            return
        factor = float(grad_scale)
        for param in self._params:
            gradient = param.attach_gradient()
            if factor != 1.0:
                gradient.mul_(factor)
        for group in self._torch_optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        self._torch_optimizer.step()
        for param in self._params:
            param.release_gradient()

    def _init_state(self) -> None:
        """Create the states as torch does in its first step."""
        if self._torch_optimizer is None or self._torch_optimizer.state:
            return
        for param in self._params:
            state = self._torch_optimizer.state[param.values]
            if isinstance(self._torch_optimizer, torch.optim.AdamW):
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.values.device)
                state["exp_avg"] = torch.zeros_like(param.values)
                state["exp_avg_sq"] = torch.zeros_like(param.values)
            elif self._momentum:
                state["momentum_buffer"] = torch.zeros_like(param.values)

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        for param in self._params:  # none without an optimizer
            assert self._torch_optimizer is not None
            state = self._torch_optimizer.state[param.values]
            for torch_name, name in STATE_NAMES.items():
                if (tensor := state.get(torch_name)) is not None:
                    states = list(states_of_segment(name, param.segment, param.shard_slice.start, tensor))
                    yield from states
                    if torch_name == "exp_avg":
                        yield from (count_state("step", one.param_group, one.piece, state["step"]) for one in states)

    def states(self) -> list[Tensor]:
        state = {} if self._torch_optimizer is None else self._torch_optimizer.state
        return [value for values in state.values() for value in values.values() if torch.is_tensor(value)]
