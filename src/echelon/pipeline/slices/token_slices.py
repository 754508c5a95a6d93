"""Slices of a sequence's tokens, one after another: what later ones need of earlier ones, forward and backward.

[Note: gradients of the past]

    forward of slice j    its keys and values are kept, cut off from the graph (leaves). Its queries see the leaves of
                          slices 0 .. j - 1 and its own keys and values
    backward of slice j   comes after those of all later slices, which have left the gradients of j's keys and values in
                          j's leaves. It starts from its output's gradient and from these

Dropout masks are functions of the place in the whole sequence, so a dropout is told which part of it it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from echelon.models.attention import AttentionContext, CoreAttention
from echelon.models.model_config import ModelConfig
from echelon.parallel.apply import ParallelModel
from echelon.pipeline.execution.runtime import MicrobatchInputs
from echelon.pipeline.schedules.slice_lengths import choose_slice_lengths
from echelon.rng import Dropout

OVERHEAD_TOKENS = 16
"""tokens whose time a slice costs beside its own: starting it, and a device that it does not fill"""


@dataclass
class SliceKeysValues:
    """Keys and values of one slice in one attention."""

    outputs: tuple[Tensor, Tensor]
    leaves: tuple[Tensor, Tensor]


class SliceKVCache:
    """The past of one attention core, by microbatch and slice."""

    def __init__(self, slice_state: SliceState):
        self.slice_state = slice_state
        self.slices: dict[tuple[int, int], SliceKeysValues] = {}

    def attend(self, core: CoreAttention, q: Tensor, k: Tensor, v: Tensor, seen: AttentionContext) -> Tensor:
        return core.local_attention(q, *self._extend(k, v), seen)

    def _extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.slice_state.current is None:
            return k, v
        m, part = self.slice_state.current
        if (m, part) not in self.slices:  # a repeated forward (recomputation) finds its own
            leaves = (k.detach().requires_grad_(k.requires_grad), v.detach().requires_grad_(v.requires_grad))
            self.slices[m, part] = SliceKeysValues((k, v), leaves)
        before = [self.slices[m, earlier].leaves for earlier in range(part)]
        return torch.cat([*(k for k, _ in before), k], dim=2), torch.cat([*(v for _, v in before), v], dim=2)


class SliceState:
    """The slices of a stage's sequences. `at` is the (microbatch, slice) at hand; none where sequences are whole."""

    def __init__(self, parallel: ParallelModel):
        self.current: tuple[int, int] | None = None
        self.span = (0, 0, 0)
        """start and stop of the slice at hand, and the length of the whole sequence"""
        self.kv_caches: list[SliceKVCache] = []
        for module in parallel.model.modules():
            if isinstance(module, CoreAttention):
                past = SliceKVCache(self)
                module.backend = past
                self.kv_caches.append(past)
            elif isinstance(module, Dropout):
                module.register_forward_pre_hook(self._set_dropout_window)

    def _set_dropout_window(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """A dropout's part of the whole sample: positions are dim 1 of activations, dims 2 and 3 of probabilities."""
        assert isinstance(module, Dropout)
        start, _, length = self.span
        mine = {2: (start, length), 3: (0, length)} if args[0].dim() == 4 else {1: (start, length)}
        others = {dim: part for dim, part in module.window.items() if dim not in mine}
        module.window = others if self.current is None else others | mine

    def kv_gradients(self, m: int, slice_index: int) -> list[tuple[Tensor, Tensor]]:
        """(tensor, its gradient) of what later slices have used of a slice."""
        found = []
        for past in self.kv_caches:
            kept = past.slices[m, slice_index]
            found += [
                (made, leaf.grad) for made, leaf in zip(kept.outputs, kept.leaves, strict=True) if leaf.grad is not None
            ]
        return found

    def release(self, m: int, slice_index: int) -> None:
        """After its backward a slice is needed no more."""
        for past in self.kv_caches:
            del past.slices[m, slice_index]


def slice_lengths(length: int, stages: int, model: object, fixed_lengths: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The lengths of a sequence's slices: those given, or TeraPipe's choice by predicted times."""
    if fixed_lengths:
        if sum(fixed_lengths) != length or min(fixed_lengths) < 1:
            raise ValueError(
                f"the slices do not make up the sequence ({list(fixed_lengths)}, {length} tokens); sum to {length}"
            )
        return fixed_lengths
    return choose_slice_lengths(length, stages, slice_time_model(model), granularity=max(1, length // 64))


def slice_time_model(model: object) -> Callable[[int, int], float]:
    """The time of a slice behind other tokens, in units of one token's products: attention grows with what it sees."""
    config = getattr(model, "config", None)
    share = 0.0
    if isinstance(config, ModelConfig):
        # Per token: 2 FLOPs a parameter of the block, and 4 x width for each token that it sees.
        parameters = (
            2 * config.width * (config.width + config.kv_heads * config.head_dim) + 3 * config.width * config.ffn
        )
        share = 4 * config.width / (2 * parameters)
    return lambda tokens, before: OVERHEAD_TOKENS + tokens * (1 + share * (before + (tokens + 1) / 2))


def sequence_length(microbatches: Sequence[MicrobatchInputs]) -> int:
    """The tokens of a step's sequences; every input is [rows, tokens, ...]."""
    per_work = [
        {int(value.shape[1]) if value.dim() > 1 else 0 for value in work.inputs.values()} for work in microbatches
    ]
    found = sorted(set().union(*per_work))
    if len(found) == 1 and found[0]:
        return found[0]
    if all(len(one) == 1 for one in per_work) and 0 not in found:
        why = "the microbatches of a step must be of one length"
    else:
        why = "every input must have the tokens of the sequence as its second dimension"
    raise ValueError(f"schedule=terapipe slices sequences, and {why} ({found}); pad them, or use schedule=1f1b")


def slice_microbatch(microbatch: MicrobatchInputs, lengths: tuple[int, ...]) -> list[MicrobatchInputs]:
    """One microbatch as its slices."""
    found, start = [], 0
    for number, size in enumerate(lengths):
        inputs: Mapping[str, Tensor] = {key: value[:, start : start + size] for key, value in microbatch.inputs.items()}
        found.append(
            MicrobatchInputs(
                inputs,
                microbatch.samples,
                full_inputs=microbatch.inputs,
                slice_index=number,
                span=(start, start + size, sum(lengths)),
            )
        )
        start += size
    return found
