"""Tensor and sequence parallelism of a foreign model: its class runs unchanged, in regions that were derived.

    embedding      sharded by rows of the vocabulary, whatever the class does with them
    regions        columns and row of each (region_plan.py)
    whole          what no plan splits: every rank computes all of it, under sequence parallelism on gathered sequences
    lm_head        sharded by rows of the vocabulary; where the model's map of its output is not elementwise
                   (language_head.py), every rank gathers the logits of the tokens at hand

[Note: dropout of a rank's part]

A mask is that of the full tensor at the place of a rank's part. Between regions that part is a slice of the sequence
(sp=1). Inside, from the entry to the row, four dimensions are [batch, heads, ...] and three [batch, tokens, features].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.layout.placement import DimSplit, LogicalParam
from echelon.models.foreign.causal_lm import ForeignCausalLM, derive_class
from echelon.models.lora.adapter import iter_adapters
from echelon.parallel.comm.autograd_collective import with_backward
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.tp.derive_regions import DerivedSplit, derive_split
from echelon.parallel.tp.region_plan import ReducedLinear, RegionSplitter
from echelon.parallel.tp.tensor_parallel import make_boundary
from echelon.parallel.tp.tp_collectives import (
    RegionBoundary,
    SequenceParallelBoundary,
    all_gather_sequence,
    local_sequence_slice,
    positions_per_rank,
)
from echelon.parallel.tp.vocab_cross_entropy import local_row_index, vocab_parallel_cross_entropy
from echelon.rng import Dropout


def shard_foreign_model(
    model: ForeignCausalLM, params: Iterable[LogicalParam], axis: MeshAxis, *, sequence_parallel: bool
) -> tuple[list[LogicalParam], RegionBoundary]:
    """Find the regions of a foreign model, and split it over `axis`."""
    derived = derive_split(model, axis.size)
    boundary = make_boundary(axis, sequence_parallel=sequence_parallel)
    return ForeignSplitter(model, params, boundary).split_model(derived), boundary


class VocabParallelLookup(nn.Module):
    """Put before the class of an embedding: looks up the rows that this rank holds, and sums over the ranks."""

    boundary: RegionBoundary
    vocab_size: int

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        axis, rows = self.boundary.axis, self._num_rows()
        local, is_remote = local_row_index(ids, axis.index * rows, rows, self.vocab_size)
        found = super().forward(local, *args, **kwargs)
        return self.boundary.leave(found.masked_fill(is_remote[..., None], 0.0))

    def _num_rows(self) -> int:
        weight = self._parameters["weight"]
        assert weight is not None
        return weight.shape[0]


class ForeignSplitter(RegionSplitter):
    """Splits a whole foreign model over tp."""

    def __init__(self, model: ForeignCausalLM, params: Iterable[LogicalParam], boundary: RegionBoundary):
        super().__init__(model, params, boundary)
        self.foreign = model
        self.is_sequence_parallel = isinstance(boundary, SequenceParallelBoundary)

    def split_model(self, derived: DerivedSplit) -> list[LogicalParam]:
        sharded = [plan for plan in derived.regions if not (plan.enters_at_columns and self.is_sequence_parallel)]
        for plan in sharded:
            self.split(plan)
        self._split_embedding()
        self._split_head()
        if self.is_sequence_parallel:
            self._divide_sequences(derived, {plan.module for plan in sharded})
        self._place_dropouts({plan.module for plan in sharded})
        self.foreign.runs_by_layer = True
        return self.split_params()

    def _split_embedding(self) -> None:
        model: Any = self.foreign
        embedding = model.get_input_embeddings()
        name = next(name for name, module in model.named_modules() if module is embedding)
        vocab_size = self.params[f"{name}.weight"].shape[0]
        self.update_param(f"{name}.weight", splits=(DimSplit(axis="tp", dim=0, num_parts=self.axis.size),))
        derive_class(embedding, VocabParallelLookup)
        embedding.boundary, embedding.vocab_size = self.boundary, vocab_size
        if embedding.padding_idx is not None:
            first = self.axis.index * -(-vocab_size // self.axis.size)
            padding = embedding.padding_idx - first
            embedding.padding_idx = padding if 0 <= padding < -(-vocab_size // self.axis.size) else None

    def _split_head(self) -> None:
        model: Any = self.foreign
        head = model.get_output_embeddings()
        name = next(name for name, module in model.named_modules(remove_duplicate=False) if module is head)
        vocab_size = self.params[f"{name}.weight"].shape[0]
        for attribute, _ in head.named_parameters():
            self.update_param(f"{name}.{attribute}", splits=(DimSplit(axis="tp", dim=0, num_parts=self.axis.size),))
        head.register_forward_pre_hook(self._enter, with_kwargs=True)

        def full_logits(logits: Tensor) -> Tensor:
            return torch.cat(self.axis.all_gather(logits).unbind(0), dim=-1)[..., :vocab_size]

        def gather(logits: Tensor) -> Tensor:
            rows = logits.shape[-1]
            return with_backward(logits, full_logits, lambda dy: own_words(dy, self.axis, rows))

        if not model.logit_map.divides_vocab:
            head.gather, head.gathered_words = gather, vocab_size
            return
        model.full_logits = full_logits
        model.token_losses = lambda logits, targets: vocab_parallel_cross_entropy(
            logits, targets, self.axis, vocab_size
        )

    # -- sequence parallelism -----------------------------------------------------------------------------------------

    def _divide_sequences(self, derived: DerivedSplit, sharded: set[str]) -> None:
        """Between regions each rank has a slice of the sequence: its gradients of replicated parameters are partial."""
        stack, whole = self.foreign.layer_stack, set(derived.whole)
        self.foreign.embeds_slices = True
        for name in whole:
            module = self.foreign.get_submodule(name)
            module.register_forward_pre_hook(self._gather, with_kwargs=True)
            module.register_forward_hook(self._keep_slice)
        for name, param in list(self.params.items()):
            inside = any(name.startswith(f"{module}.") for module in (*whole, *sharded))
            if not inside and not param.splits and name == param.name:
                self.update_param(name, partial_grad_axes=("tp",))
        embedding = self.foreign.get_input_embeddings()  # type: ignore[operator]
        for name in stack.added_sizes:
            module = self.foreign.get_submodule(name)
            if module is not embedding:
                module.register_forward_hook(lambda _module, _args, out: local_sequence_slice(out, self.axis))

    def _gather(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the slices of every hidden tensor. All ranks then compute the same, so gradients are sliced."""
        boundary, axis = self.boundary, self.axis
        part, hidden = positions_per_rank(boundary.length, axis), self.foreign.layer_stack.hidden_size

        def gather(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[1:] != (part, hidden):
                return x
            length = boundary.length
            return with_backward(
                x, lambda x: all_gather_sequence(x, axis, length), lambda dy: own_slice(dy, axis).contiguous()
            )

        return tuple(map(gather, args)), {key: gather(value) for key, value in kwargs.items()}

    def _keep_slice(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        axis, length = self.axis, self.boundary.length

        def keep(x: Tensor) -> Tensor:
            return with_backward(
                x, lambda x: own_slice(x, axis).contiguous(), lambda dy: all_gather_sequence(dy, axis, length)
            )

        return (keep(output[0]), *output[1:]) if isinstance(output, tuple) else keep(output)

    # -- dropout ------------------------------------------------------------------------------------------------------

    def _place_dropouts(self, sharded: set[str]) -> None:
        inside: list[bool] = [False]

        def enter(_module: nn.Module, _args: Any) -> None:
            inside[0] = True

        def leave(_module: nn.Module, *_others: Any) -> None:
            inside[0] = False

        for name in sharded:
            module = self.foreign.get_submodule(name)
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)
            for child in module.modules():
                if isinstance(child, ReducedLinear):
                    child.register_forward_hook(leave)
        adapters = {id(adapter.dropout) for _, adapter in iter_adapters(self.foreign)}
        for module in self.foreign.modules():
            if isinstance(module, Dropout) and id(module) not in adapters:
                module.register_forward_pre_hook(lambda site, args: self._set_window(site, args[0], inside[0]))

    def _set_window(self, site: Any, x: Tensor, inside: bool) -> None:
        size = self.axis.size
        dim = (1 if x.dim() == 4 else 2) if inside else 1
        if inside or (self.is_sequence_parallel and x.dim() == 3):
            site.window = {dim: (self.axis.index * x.shape[dim], size * x.shape[dim])}
        else:
            site.window = {}


def own_words(x: Tensor, axis: Any, rows: int) -> Tensor:
    """This rank's words of all logits [..., words]; those of padding are zero."""
    local = x[..., axis.index * rows : (axis.index + 1) * rows]
    return F.pad(local, (0, rows - local.shape[-1]))


def own_slice(x: Tensor, axis: Any) -> Tensor:
    """This rank's slice of a full sequence; positions beyond its end are zero."""
    part = positions_per_rank(x.shape[1], axis)
    out = x.new_zeros(x.shape[0], part, *x.shape[2:])
    local = x[:, axis.index * part : (axis.index + 1) * part]
    out[:, : local.shape[1]] = local
    return out
