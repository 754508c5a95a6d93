"""Transform of context parallelism: each cp rank gets a slice of every sequence, and attention reaches the others.

cost.py describes the kinds, zigzag.py says which rank holds which tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.layout import Layout
from echelon.models.attention import AttentionContext, CoreAttention
from echelon.models.foreign.causal_lm import DividedSequences, ForeignCausalLM
from echelon.models.model_config import IGNORE_INDEX
from echelon.parallel.comm.mesh_axis import SINGLE_RANK, MeshAxes, MeshAxis
from echelon.parallel.cp import ulysses
from echelon.parallel.cp.all_gather_attention import AllGatherAttention
from echelon.parallel.cp.cp_attention import ContextParallelAttention, MaskSpec
from echelon.parallel.cp.ring_attention import RingAttention
from echelon.parallel.cp.sequence_gather import SequenceGather
from echelon.parallel.cp.sequence_plan import plan_sequences
from echelon.parallel.cp.window_attention import WindowAttention
from echelon.parallel.cp.zigzag import ZigzagOrder
from echelon.parallel.tp.cost import region_axis
from echelon.rng import Dropout, RandomSite

if TYPE_CHECKING:
    from echelon.parallel.transform_context import TransformContext

TARGET_INPUTS = ("targets", "labels")
"""inputs whose padding must not count"""


def apply_context_parallel(context: TransformContext) -> None:
    """Make every attention core of the model attend to the tokens of the other cp ranks."""
    model, layout = context.model, context.layout
    if layout.cp == 1:
        return
    if isinstance(model, ForeignCausalLM):
        _apply_to_foreign_model(context, model)
        return
    cores = [module for module in model.modules() if isinstance(module, CoreAttention)]
    arguments = inspect.signature(model.forward).parameters
    missing = [] if cores else ["its attention must be the module echelon.CoreAttention"]
    if "positions" not in arguments and not any(p.kind is p.VAR_KEYWORD for p in arguments.values()):
        missing.append("its forward must take `positions`, where each token is in its document")
    if missing:
        raise ValueError(
            f"context parallelism cannot shard the sequences of {type(model).__name__} (cp={layout.cp}): "
            f"{' and '.join(missing)}; or use cp=1"
        )
    _connect(context, ContextParallel(model, layout, context.axes, context.options.device))


def _apply_to_foreign_model(context: TransformContext, model: ForeignCausalLM) -> None:
    """Divide what a trial shows to be divisible, and gather sequences for the rest."""
    layout, plan = context.layout, plan_sequences(model)
    if plan.problem:
        raise ValueError(
            f"context parallelism cannot divide the sequences of {type(model).__name__} (cp={layout.cp}): "
            f"{plan.problem}; use cp=1"
        )
    cp_context = ContextParallel(model, layout, context.axes, context.options.device)
    cp_context.sequences = sequences = SequenceGather(cp_context, model.layer_stack)
    divided = DividedSequences(
        sequences=sequences,
        full_layers=frozenset(plan.gathered_layers(model)),
        full_embedding=plan.gathers_embedding,
        full_tables=plan.gathers_positions,
    )
    model.divide_sequences(plan.cores, divided)
    for name in plan.gathered:
        sequences.attach(name, model.get_submodule(name), sequence_parallel=bool(layout.sp))
    _connect(context, cp_context)


def _connect(context: TransformContext, cp_context: ContextParallel) -> None:
    """Let attention cores reach other ranks, and dropouts know their tokens."""
    context.cp_context = cp_context
    cores = [module for module in context.model.modules() if isinstance(module, CoreAttention)]
    for core in cores:
        core.backend = cp_context
    attention_dropouts = {id(core.dropout) for core in cores}
    # The gates of our own MoE layers know the tokens of their draws.
    sites = RandomSite if isinstance(context.model, ForeignCausalLM) else Dropout
    for module in context.model.modules():
        if isinstance(module, sites) and id(module) not in attention_dropouts:
            module.register_forward_pre_hook(cp_context.set_dropout_window)


class ContextParallel:
    """One rank's slice of the current sequences, and the attention backend that reaches the other slices."""

    def __init__(self, model: nn.Module, layout: Layout, axes: MeshAxes, device: torch.device):
        is_hybrid = 1 < layout.ulysses < layout.cp
        self.axis, single = axes.get_or_add("cp"), axes.get_or_add(SINGLE_RANK)
        self.ring_axis = axes.get_or_add("ring") if is_hybrid else single if layout.ulysses > 1 else self.axis
        """ranks that exchange keys and values"""
        self.ulysses_axis = axes.get_or_add("ulysses") if is_hybrid else self.axis if layout.ulysses > 1 else single
        """ranks that exchange heads for tokens"""
        if device.type == "cuda":
            # NCCL serializes the operations of a communicator: these would wait for gradient reductions.
            self.ring_axis = _with_new_process_group(self.ring_axis)
            self.ulysses_axis = _with_new_process_group(self.ulysses_axis)
        self.heads_axis = axes[region_axis(layout)]
        """ranks of tp that divide the heads"""
        self.sp_axis = axes["tp"] if layout.sp else single
        """ranks of tp that divide the local tokens between regions"""
        self.gathers_keys = layout.cp_kind == "gather"
        self.check_length: Any = getattr(model, "check_length", None)
        self.token_positions: Any = getattr(model, "token_positions", _sequential_positions)
        self.sequences: SequenceGather | None = None
        """modules that get full sequences"""
        self.seq_len = 0
        """tokens of the current sequences, without padding"""
        # Sequences may be of any length; the caches hold a few.
        self._cached_attention = lru_cache(maxsize=8)(self._make_attention)
        self._cached_positions = lru_cache(maxsize=8)(self._make_positions)

    @property
    def order(self) -> ZigzagOrder:
        """How the current sequences are sharded."""
        return ZigzagOrder(self.ring_axis.size, self.ulysses_axis.size, self.seq_len)

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens in the sequence; padding lies beyond its end."""
        return self._cached_positions(self.order, device)

    def _make_positions(self, order: ZigzagOrder, device: torch.device) -> Tensor:
        return torch.tensor(order.rank_positions(self.axis.index), device=device)

    # -- inputs -------------------------------------------------------------------------------------------------------

    def shard_inputs(self, inputs: Mapping[str, Tensor], *, has_loss: bool = True) -> dict[str, Tensor]:
        """Return this rank's slice of inputs [sequences, tokens, ...], with the positions of its tokens.

        `documents` stays unsharded: attention needs those of remote tokens too. With `has_loss`, padded targets must
        not count.
        """
        self.seq_len = _common_seq_len(inputs)
        order, sample = self.order, next(iter(inputs.values()))
        targets = [key for key in TARGET_INPUTS if key in inputs]
        if has_loss and order.padded_len > self.seq_len and not any(_is_integer(inputs[key]) for key in targets):
            raise ValueError(
                f"a sequence of {self.seq_len} tokens must be padded to {order.padded_len} with target {IGNORE_INDEX}, "
                f"but no input called {' or '.join(TARGET_INPUTS)} is of whole numbers "
                f"({', '.join(inputs)}); pad the sequences yourself, or use another length"
            )
        if self.check_length is not None and "tokens" in inputs:
            self.check_length(inputs["tokens"])
        documents = inputs.get("documents")
        positions = self.positions(sample.device)
        index = positions.clamp(max=self.seq_len - 1)
        local = {key: value.index_select(1, index) for key, value in inputs.items() if key != "documents"}
        for key in targets:
            padding = (positions >= self.seq_len).view(-1, *[1] * (local[key].dim() - 2))
            local[key] = local[key].masked_fill(padding, IGNORE_INDEX) if _is_integer(local[key]) else local[key]
        if "positions" not in local:
            local["positions"] = self.token_positions(sample, documents).index_select(1, index)
        if documents is not None:
            local["documents"] = F.pad(documents, (0, order.padded_len - self.seq_len))
        return local

    def last_token(self, x: Tensor) -> Tensor:
        """Return [B, ...] of the sequences' last tokens on every rank, from each rank's [B, local tokens, ...]."""
        is_last = (self.positions(x.device) == self.seq_len - 1).to(x.dtype)
        return self.axis.all_reduce(torch.einsum("bt...,t->b...", x, is_last))

    def set_dropout_window(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Set the positions that dimension 1 of a dropout's input covers: its mask is theirs."""
        assert isinstance(module, RandomSite)
        if self.sequences is not None and self.sequences.inside:
            return
        positions, size = self.positions(args[0].device), args[0].shape[1]
        is_whole = size == len(positions)  # an embedding, before sequence parallelism slices what it gives
        if args[0].dim() < 3 or not (is_whole or size == -(-len(positions) // self.sp_axis.size)):
            raise ValueError(
                f"context parallelism cannot tell which tokens dropout {module.site!r} sees (input "
                f"{tuple(args[0].shape)}, {len(positions)} local tokens); give it [sequences, tokens, ...], or use cp=1"
            )
        start = 0 if is_whole else self.sp_axis.index * size
        local = torch.arange(start, start + size, device=positions.device).clamp(max=len(positions) - 1)
        module.window = {**module.window, 1: (positions[local], self.seq_len)}

    def _make_attention(
        self, order: ZigzagOrder, *, causal: bool, window: int | None, device: torch.device
    ) -> ContextParallelAttention:
        if self.gathers_keys:
            return AllGatherAttention(self.ring_axis, order, causal=causal, device=device, window=window)
        if window is not None:
            return WindowAttention(self.ring_axis, order, window=window, device=device)
        return RingAttention(self.ring_axis, order, causal=causal, device=device)

    # -- attention ----------------------------------------------------------------------------------------------------

    def attend(
        self,
        core: CoreAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: AttentionContext,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the output of `core` for the local queries, from the keys and values of all cp ranks."""
        self._check(q, context)
        # Queries, keys and values are sent as one tensor: narrower values are padded with zeros on the way.
        value_padding = q.shape[-1] - v.shape[-1]
        if value_padding:
            v = F.pad(v, (0, value_padding))
        first_head, heads = self.heads_axis.index * q.shape[1], self.heads_axis.size * q.shape[1]
        if self.ulysses_axis.size > 1:
            q, k, v = ulysses.shard_heads(q, k, v, self.ulysses_axis)
            first_head += self.ulysses_axis.index * q.shape[1]
            sinks = None if sinks is None else sinks.view(self.ulysses_axis.size, -1)[self.ulysses_axis.index]
        has_dropout = core.training and core.dropout.p > 0
        window = _effective_window(core.scores.window, self.seq_len, causal=context.causal)
        attention = self._cached_attention(self.order, causal=context.causal, window=window, device=q.device)
        is_fused = window is None and core.scores.softcap is None and sinks is None
        if self.ring_axis.size == 1 and not has_dropout and is_fused:
            y = self._local_attention(core, q, k, v, context=context)
        else:
            dropout = core.dropout if has_dropout else None
            assert dropout is None or isinstance(dropout, Dropout)
            mask = MaskSpec(
                query_positions=attention.local_positions,
                length=self.seq_len,
                documents=context.documents,
                hide_padding=not context.causal and self.order.padded_len > self.seq_len,
                dropout=dropout,
                heads=(first_head, heads),
                scores=core.scores,
            )
            y = attention.attend(q, k, v, mask, sinks)
        if value_padding:
            y = y[..., :-value_padding]
        return ulysses.unshard_heads(y, self.ulysses_axis) if self.ulysses_axis.size > 1 else y

    def _local_attention(self, core: CoreAttention, *qkv: Tensor, context: AttentionContext) -> Tensor:
        """Attend within full sequences in natural order, without the padding at their end."""
        q, k, v = (x[:, :, : self.seq_len] for x in qkv)
        positions, padding = torch.arange(self.seq_len, device=q.device).unsqueeze(0), qkv[0].shape[2] - self.seq_len
        documents = context.documents[:, : self.seq_len] if context.documents is not None else None
        y = core.local_attention(q, k, v, AttentionContext(positions, documents, context.causal))
        return F.pad(y, (0, 0, 0, padding)) if padding else y

    def _check(self, q: Tensor, context: AttentionContext) -> None:
        padded_len, documents = self.order.padded_len, context.documents
        expected = padded_len // self.axis.size
        if q.shape[2] != expected:
            raise ValueError(
                f"context parallelism gave this rank {expected} tokens of each sequence, and attention has "
                f"{q.shape[2]}; a model must neither add nor drop tokens, or use cp=1"
            )
        if documents is not None and documents.shape[1] != padded_len:
            raise ValueError(
                f"documents must be those of the full sequence ({padded_len} tokens with padding, given "
                f"{documents.shape[1]}); give AttentionContext the input `documents` as it comes"
            )


def _effective_window(window: int | None, seq_len: int, *, causal: bool) -> int | None:
    """The window, if some query does not attend to all tokens before it."""
    if window is None or (causal and window >= seq_len):
        return None
    if not causal:
        raise ValueError(f"a window counts earlier tokens (window={window}); use it with causal attention")
    return window


def _with_new_process_group(axis: MeshAxis) -> MeshAxis:
    """Return the same ranks with a process group of their own."""
    if axis.size == 1:
        return axis
    rank, group = axis.ranks[axis.index], axis.new_process_group()
    return MeshAxis(axis.name, axis.ranks, rank, group, axis.dropped_ops, recorder=axis.recorder)


def _sequential_positions(tokens: Tensor, _documents: Tensor | None) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)


def _is_integer(x: Tensor) -> bool:
    """The dtype can hold the target index that is ignored."""
    return x.dtype in (torch.int64, torch.int32, torch.int16)


def _common_seq_len(inputs: Mapping[str, Tensor]) -> int:
    lengths = sorted({int(value.shape[1]) if value.dim() > 1 else 0 for value in inputs.values()})
    if len(lengths) != 1 or not lengths[0]:
        raise ValueError(
            "context parallelism shards sequences, and every input must have the tokens of the sequence as its second "
            f"dimension ({', '.join(f'{key} {tuple(value.shape)}' for key, value in inputs.items())}); use cp=1"
        )
    return lengths[0]
