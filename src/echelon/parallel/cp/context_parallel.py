"""Sequences cut over the ranks of cp: what each rank is given of a batch, and how its attention reaches the rest.

See context.py for the kinds and zigzag.py for who holds which tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.layout import Layout
from echelon.models.attention import AttentionContext, CoreAttention
from echelon.models.model_config import IGNORE_INDEX
from echelon.parallel.comm.mesh_axis import MeshAxes, MeshAxis
from echelon.parallel.cp import ulysses
from echelon.parallel.cp.all_gather_attention import AllGatherAttention
from echelon.parallel.cp.block_attention import MaskSpec
from echelon.parallel.cp.ring_attention import RingAttention
from echelon.parallel.cp.zigzag import ZigzagOrder
from echelon.parallel.tp_grid.grid_parallel import heads_axis
from echelon.rng import Dropout

TARGET_INPUTS = ("targets", "labels")
"""inputs whose padding must not count"""


def apply_context_parallel(model: nn.Module, layout: Layout, axes: MeshAxes, device: torch.device) -> ContextParallel:
    """Makes every attention core of a model reach the other ranks of cp."""
    cores = [module for module in model.modules() if isinstance(module, CoreAttention)]
    takes = inspect.signature(model.forward).parameters
    missing = [] if cores else ["its attention must be the module echelon.Core"]
    if "positions" not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        missing.append("its forward must take `positions`, where each token is in its document")
    if missing:
        raise ValueError(
            f"context parallelism cannot cut the sequences of {type(model).__name__} (cp={layout.cp}): "
            f"{' and '.join(missing)}; or use cp=1"
        )
    context = ContextParallel(model, layout, axes, device)
    for core in cores:
        core.backend = context
    inside = {id(core.dropout) for core in cores}
    for module in model.modules():
        if isinstance(module, Dropout) and id(module) not in inside:
            module.register_forward_pre_hook(context.set_dropout_window)
    return context


class ContextParallel:
    """One rank's slice of the sequences at hand."""

    def __init__(self, model: nn.Module, layout: Layout, axes: MeshAxes, device: torch.device):
        both = 1 < layout.ulysses < layout.cp
        for name in ("cp", *(("ring", "ulysses") if both else ())):
            axes.add(name)
        self.axis, alone = (
            axes["cp"],
            MeshAxis("alone", (axes.rank,), axes.rank, None, frozenset(), recorder=axes.recorder),
        )
        self.ring_axis = axes["ring"] if both else alone if layout.ulysses > 1 else self.axis
        """ranks that reach each other's keys and values"""
        self.ulysses_axis = axes["ulysses"] if both else self.axis if layout.ulysses > 1 else alone
        """ranks that exchange heads for tokens"""
        if device.type == "cuda":
            # NCCL runs a communicator's messages one after another: these would wait for gradients on their way.
            self.ring_axis, self.ulysses_axis = (
                _with_new_process_group(axis) for axis in (self.ring_axis, self.ulysses_axis)
            )
        self.heads_axis = axes[heads_axis(layout)]
        """ranks of tp that divide the heads"""
        self.sp_axis = axes["tp"] if layout.sp else alone
        """ranks of tp that divide the tokens at hand between regions"""
        self.attention_class: type[RingAttention | AllGatherAttention] = (
            AllGatherAttention if layout.cp_kind == "gather" else RingAttention
        )
        self.check_length: Any = getattr(model, "check_length", None)
        self.token_positions: Any = getattr(model, "token_positions", _sequential_positions)
        self.seq_len = 0
        """tokens of the sequences at hand, without padding"""
        # For a few lengths, since sequences may be of any.
        self._cached_attention = lru_cache(maxsize=8)(self._make_attention)
        self._cached_positions = lru_cache(maxsize=8)(self._make_positions)

    @property
    def order(self) -> ZigzagOrder:
        return ZigzagOrder(self.ring_axis.size, self.ulysses_axis.size, self.seq_len)

    def positions(self, device: torch.device) -> Tensor:
        """Where the tokens at hand are in the sequence; padding is beyond its end."""
        return self._cached_positions(self.order, device)

    def _make_positions(self, order: ZigzagOrder, device: torch.device) -> Tensor:
        return torch.tensor(order.rank_positions(self.axis.index), device=device)

    # -- cutting ------------------------------------------------------------------------------------------------------

    def shard_inputs(self, inputs: Mapping[str, Tensor], *, has_loss: bool = True) -> dict[str, Tensor]:
        """This rank's slice of inputs that are [rows, tokens, ...], with the positions of its tokens.

        Documents stay whole: attention asks for those of tokens elsewhere too. `counted`: there is a loss, in which
        padding must not count.
        """
        self.seq_len = _common_seq_len(inputs)
        order, some = self.order, next(iter(inputs.values()))
        targets = [key for key in TARGET_INPUTS if key in inputs]
        if has_loss and order.padded_len > self.seq_len and not any(_is_integer(inputs[key]) for key in targets):
            raise ValueError(
                f"a sequence of {self.seq_len} tokens must be padded to {order.padded_len}, and padding must not count: its "
                f"target is {IGNORE_INDEX}, but no input called {' or '.join(TARGET_INPUTS)} is of whole numbers "
                f"({', '.join(inputs)}); pad the sequences yourself, or use another length"
            )
        if self.check_length is not None and "tokens" in inputs:
            self.check_length(inputs["tokens"])
        documents = inputs.get("documents")
        places = self.positions(some.device)
        inside = places.clamp(max=self.seq_len - 1)
        found = {key: value.index_select(1, inside) for key, value in inputs.items() if key != "documents"}
        for key in targets:
            padding = (places >= self.seq_len).view(-1, *[1] * (found[key].dim() - 2))
            found[key] = found[key].masked_fill(padding, IGNORE_INDEX) if _is_integer(found[key]) else found[key]
        if "positions" not in found:
            found["positions"] = self.token_positions(some, documents).index_select(1, inside)
        if documents is not None:
            found["documents"] = F.pad(documents, (0, order.padded_len - self.seq_len))
        return found

    def last_token(self, x: Tensor) -> Tensor:
        """[B, ...] of the sequences' last tokens, on every rank, from [B, tokens, ...] of each rank's own."""
        mine = (self.positions(x.device) == self.seq_len - 1).to(x.dtype)
        return self.axis.all_reduce(torch.einsum("bt...,t->b...", x, mine))

    def set_dropout_window(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Tells a dropout which positions, its dimension 1, are at hand."""
        assert isinstance(module, Dropout)
        places, size = self.positions(args[0].device), args[0].shape[1]
        if args[0].dim() < 3 or size != -(-len(places) // self.sp_axis.size):
            raise ValueError(
                f"context parallelism cannot tell which tokens dropout {module.site!r} sees (input "
                f"{tuple(args[0].shape)}, {len(places)} tokens at hand); give it [rows, tokens, ...], or use cp=1"
            )
        start = self.sp_axis.index * size
        mine = torch.arange(start, start + size, device=places.device).clamp(max=len(places) - 1)
        module.window = {**module.window, 1: (places[mine], self.seq_len)}

    # -- attention ----------------------------------------------------------------------------------------------------

    def attend(self, core: CoreAttention, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        """What `core` gives for the tokens at hand, from everyone's keys and values."""
        self._check(q, context)
        # Queries, keys and values travel as one tensor: values that are narrower have zeros behind them on the way.
        narrower = q.shape[-1] - v.shape[-1]
        if narrower:
            v = F.pad(v, (0, narrower))
        first, heads = self.heads_axis.index * q.shape[1], self.heads_axis.size * q.shape[1]
        if self.ulysses_axis.size > 1:
            q, k, v = ulysses.shard_heads(q, k, v, self.ulysses_axis)
            first += self.ulysses_axis.index * q.shape[1]
        drops = core.training and core.dropout.p > 0
        reach = self._cached_attention(self.order, context.causal, q.device)
        if self.ring_axis.size == 1 and not drops:
            y = self._local_attention(core, q, k, v, context)
        else:
            assert isinstance(core.dropout, Dropout)
            marks = MaskSpec(
                query_positions=reach.local_positions,
                length=self.seq_len,
                documents=context.documents,
                hide_padding=not context.causal and self.order.padded_len > self.seq_len,
                dropout=core.dropout if drops else None,
                heads=(first, heads),
            )
            y = reach.attend(q, k, v, marks)
        if narrower:
            y = y[..., :-narrower]
        return ulysses.unshard_heads(y, self.ulysses_axis) if self.ulysses_axis.size > 1 else y

    def _make_attention(
        self, order: ZigzagOrder, causal: bool, device: torch.device
    ) -> RingAttention | AllGatherAttention:
        return self.attention_class(self.ring_axis, order, causal=causal, device=device)

    def _local_attention(self, core: CoreAttention, q: Tensor, k: Tensor, v: Tensor, seen: AttentionContext) -> Tensor:
        """Whole sequences in their order: padding, at the end, is left out."""
        real, padding = slice(0, self.seq_len), q.shape[2] - self.seq_len
        place = torch.arange(self.seq_len, device=q.device).unsqueeze(0)
        documents = seen.documents[:, real] if seen.documents is not None else None
        whole = AttentionContext(place, documents, seen.causal)
        y = core.local_attention(q[:, :, real], k[:, :, real], v[:, :, real], whole)
        return F.pad(y, (0, 0, 0, padding)) if padding else y

    def _check(self, q: Tensor, seen: AttentionContext) -> None:
        order = self.order
        here, documents = order.padded_len // self.axis.size, seen.documents
        if q.shape[2] != here:
            raise ValueError(
                f"context parallelism gave this rank {here} tokens of each sequence, and attention has {q.shape[2]}; "
                "a model must neither add nor drop tokens, or use cp=1"
            )
        if documents is not None and documents.shape[1] != order.padded_len:
            raise ValueError(
                f"documents must be those of the whole sequence ({order.padded_len} tokens with padding, given "
                f"{documents.shape[1]}); give Seen the input `documents` as it comes"
            )


def _with_new_process_group(axis: MeshAxis) -> MeshAxis:
    """The same ranks with a process group of their own."""
    if axis.size == 1:
        return axis
    rank, group = axis.ranks[axis.index], axis.new_process_group()
    return MeshAxis(axis.name, axis.ranks, rank, group, axis.dropped_ops, recorder=axis.recorder)


def _sequential_positions(tokens: Tensor, _documents: Tensor | None) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)


def _is_integer(x: Tensor) -> bool:
    """Of a type that can say that a target does not count."""
    return x.dtype in (torch.int64, torch.int32, torch.int16)


def _common_seq_len(inputs: Mapping[str, Tensor]) -> int:
    found = sorted({int(value.shape[1]) if value.dim() > 1 else 0 for value in inputs.values()})
    if len(found) != 1 or not found[0]:
        raise ValueError(
            "context parallelism cuts sequences, and every input must have the tokens of the sequence as its second "
            f"dimension ({', '.join(f'{key} {tuple(value.shape)}' for key, value in inputs.items())}); use cp=1"
        )
    return found[0]
