"""TeraPipe's slices of a sequence: the keys and values that later slices read, and their gradients.

[Note: gradients of keys and values]

    forward of slice j    saves its keys and values detached, as leaves. Its queries attend to the leaves of slices
                          0 .. j - 1 and to its own keys and values
    backward of slice j   runs after that of all later slices, which accumulated the gradients of j's keys and values
                          in j's leaves. It starts from its output's gradient and from these

Dropout masks are functions of the position in the full sequence, so every dropout gets the window of its slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from echelon.models.attention import AttentionContext, CoreAttention
from echelon.models.model_config import ModelConfig
from echelon.parallel.parallel_model import ParallelModel
from echelon.pipeline.execution.runtime import MicrobatchInputs
from echelon.pipeline.slices.slice_lengths import choose_slice_lengths
from echelon.rng import Dropout

OVERHEAD_TOKENS = 16
"""the fixed cost of a slice, in tokens: launching it, and a device that it does not fill"""


@dataclass
class SliceKeysValues:
    """Keys and values of one slice in one attention layer."""

    outputs: tuple[Tensor, Tensor]
    leaves: tuple[Tensor, Tensor]


class SliceKVCache:
    """The keys and values of earlier slices in one attention layer, by microbatch and slice."""

    def __init__(self, slice_state: SliceState):
        self.slice_state = slice_state
        self.slices: dict[tuple[int, int], SliceKeysValues] = {}

    def attend(
        self,
        core: CoreAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: AttentionContext,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return core.local_attention(q, *self._extend(k, v), context, sinks)

    def _extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.slice_state.current is None:
            return k, v
        m, slice_index = self.slice_state.current
        if (m, slice_index) not in self.slices:  # recomputation finds those of the first forward
            leaves = (k.detach().requires_grad_(k.requires_grad), v.detach().requires_grad_(v.requires_grad))
            self.slices[m, slice_index] = SliceKeysValues((k, v), leaves)
        earlier = [self.slices[m, index].leaves for index in range(slice_index)]
        return torch.cat([*(k for k, _ in earlier), k], dim=2), torch.cat([*(v for _, v in earlier), v], dim=2)


class SliceState:
    """Which slice a stage runs. `current` is (microbatch, slice), or None while sequences are not sliced."""

    def __init__(self, parallel: ParallelModel):
        self.current: tuple[int, int] | None = None
        self.span = (0, 0, 0)
        """start and stop of the current slice, and the length of the full sequence"""
        self.kv_caches: list[SliceKVCache] = []
        for module in parallel.model.modules():
            if isinstance(module, CoreAttention):
                cache = SliceKVCache(self)
                module.backend = cache
                self.kv_caches.append(cache)
            elif isinstance(module, Dropout):
                module.register_forward_pre_hook(self._set_dropout_window)

    def _set_dropout_window(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Set a dropout's window of the full sample: positions are dim 1 of activations, dims 2, 3 of attention."""
        assert isinstance(module, Dropout)
        start, _, length = self.span
        window = {2: (start, length), 3: (0, length)} if args[0].dim() == 4 else {1: (start, length)}
        others = {dim: part for dim, part in module.window.items() if dim not in window}
        module.window = others if self.current is None else others | window

    def kv_gradients(self, m: int, slice_index: int) -> list[tuple[Tensor, Tensor]]:
        """(keys or values, gradient) of a slice, where later slices attended to it."""
        pairs = []
        for cache in self.kv_caches:
            saved = cache.slices[m, slice_index]
            both = zip(saved.outputs, saved.leaves, strict=True)
            pairs += [(output, leaf.grad) for output, leaf in both if leaf.grad is not None]
        return pairs

    def release(self, m: int, slice_index: int) -> None:
        """Drop the keys and values of a slice after its backward."""
        for cache in self.kv_caches:
            del cache.slices[m, slice_index]


def slice_lengths(length: int, stages: int, model: object, fixed_lengths: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The lengths of a sequence's slices: the fixed ones, or TeraPipe's choice by predicted times."""
    if fixed_lengths:
        if sum(fixed_lengths) != length or min(fixed_lengths) < 1:
            raise ValueError(
                f"slice lengths do not add up to the sequence ({list(fixed_lengths)}, {length} tokens); use a sum of "
                f"{length}"
            )
        return fixed_lengths
    return choose_slice_lengths(length, stages, slice_time_model(model), granularity=max(1, length // 64))


def slice_time_model(model: object) -> Callable[[int, int], float]:
    """Predict the time of a slice after other tokens, in units of one token's matmuls: attention grows with both."""
    config = getattr(model, "config", None)
    share = 0.0
    if isinstance(config, ModelConfig):
        # Per token: 2 FLOPs per parameter of the block, and 4 x width for each token that it attends to.
        width, kv_width = config.width, config.kv_heads * config.head_dim
        parameters = 2 * width * (width + kv_width) + 3 * width * config.ffn
        share = 4 * width / (2 * parameters)
    return lambda tokens, before: OVERHEAD_TOKENS + tokens * (1 + share * (before + (tokens + 1) / 2))


def sequence_length(microbatches: Sequence[MicrobatchInputs]) -> int:
    """The sequence length of a step; every input is [sequences, tokens, ...]."""
    per_microbatch = [
        {int(value.shape[1]) if value.dim() > 1 else 0 for value in microbatch.inputs.values()}
        for microbatch in microbatches
    ]
    lengths = sorted(set().union(*per_microbatch))
    if len(lengths) == 1 and lengths[0]:
        return lengths[0]
    if all(len(one) == 1 for one in per_microbatch) and 0 not in lengths:
        why = "the microbatches of a step must be of one length"
    else:
        why = "every input must have the tokens of the sequence as its second dimension"
    raise ValueError(f"schedule=terapipe slices sequences, and {why} ({lengths}); pad them, or use schedule=1f1b")


def slice_microbatch(microbatch: MicrobatchInputs, lengths: tuple[int, ...]) -> list[MicrobatchInputs]:
    """Cut a microbatch into slices of tokens."""
    slices, start = [], 0
    for index, size in enumerate(lengths):
        inputs: Mapping[str, Tensor] = {key: value[:, start : start + size] for key, value in microbatch.inputs.items()}
        span = (start, start + size, sum(lengths))
        full = microbatch.inputs
        slices.append(MicrobatchInputs(inputs, microbatch.samples, full_inputs=full, slice_index=index, span=span))
        start += size
    return slices
