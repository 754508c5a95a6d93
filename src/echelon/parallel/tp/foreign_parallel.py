"""Tensor and sequence parallelism of a foreign model: its class runs unchanged, in regions that were derived.

    embedding      sharded by rows of the vocabulary, whatever the class does with them
    regions        columns and row of each (region_plan.py)
    whole          what no plan splits: every rank computes all of it, under sequence parallelism on gathered sequences
    lm_head        sharded by rows of the vocabulary; where the model's map of its output is not elementwise
                   (language_head.py), every rank gathers the logits of the tokens at hand

[Note: dropout of a rank's part]

A mask is that of the full tensor at the place of a rank's part. Between regions that part is a slice of the sequence
(sp=1). Inside, from the entry to the row, four dimensions are [batch, heads, ...] and three [batch, tokens, features].
A module that stayed whole sees the full tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    FullSequenceBoundary,
    RegionBoundary,
    SequenceParallelBoundary,
    all_gather_sequence,
    local_sequence_slice,
    positions_per_rank,
)
from echelon.parallel.tp.vocab_cross_entropy import local_row_index, vocab_parallel_cross_entropy
from echelon.rng import RandomSite

BETWEEN, REGION, WHOLE = "between regions", "in a region", "in a module that stayed whole"
"""where a dropout is called"""


def shard_foreign_model(
    model: ForeignCausalLM, params: Iterable[LogicalParam], axis: MeshAxis, *, sequence_parallel: bool
) -> tuple[list[LogicalParam], RegionBoundary]:
    """Find the regions of a foreign model, and split it over `axis`."""
    if sequence_parallel:
        model.require_layers("sequence parallelism (sp=1)", "sp=0")
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
        self.entered = [BETWEEN]
        """where the forward is"""
        self.rows = 0
        """sequences of what was gathered last"""

    def split_model(self, derived: DerivedSplit) -> list[LogicalParam]:
        sharded = [plan for plan in derived.regions if not (plan.enters_at_columns and self.is_sequence_parallel)]
        for plan in sharded:
            self.split(plan)
        self._split_embedding()
        self._split_head()
        if self.is_sequence_parallel:
            self._divide_sequences(derived, {plan.module for plan in sharded})
            self.foreign.runs_by_layer = True
        self._place_dropouts({plan.module for plan in sharded}, derived.whole)
        return self.split_params()

    def _split_embedding(self) -> None:
        model: Any = self.foreign
        embedding = model.get_input_embeddings()
        name = next(name for name, module in model.named_modules() if module is embedding)
        vocab_size = self.params[f"{name}.weight"].shape[0]
        self.update_param(f"{name}.weight", splits=(DimSplit(axis="tp", dim=0, num_parts=self.axis.size),))
        for other, _ in embedding.named_parameters():
            if other != "weight":  # each rank applies it to the words that it holds, in both modes
                self.update_param(f"{name}.{other}", partial_grad_axes=("tp",))
        derive_class(embedding, VocabParallelLookup)
        embedding.boundary = FullSequenceBoundary(self.axis)
        embedding.vocab_size = vocab_size
        if getattr(embedding, "padding_idx", None) is not None:
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
        stack, whole, outside = self.foreign.layer_stack, set(derived.whole), set(derived.outside)
        for name in derived.expert_layers:
            self.foreign.get_submodule(name).register_forward_pre_hook(self._slice_indices, with_kwargs=True)
        for name in whole:
            module = self.foreign.get_submodule(name)
            module.register_forward_pre_hook(self._gather, with_kwargs=True)
            module.register_forward_hook(self._keep_slice)
        self.foreign.run_embedding = self._embed_whole
        for name, param in list(self.params.items()):
            inside = (
                any(name.startswith(f"{module}.") for module in (*whole, *sharded, *stack.before))
                and name not in outside
            )
            if not inside and not param.splits and name == param.name:
                self.update_param(name, partial_grad_axes=("tp",))

    def _embed_whole(self, embed: Callable[[], Tensor]) -> Tensor:
        """This rank's slice of embeddings that every rank computes: code around them may count tokens."""
        self.entered.append(WHOLE)
        hidden = embed()
        self.entered[1:] = []
        self.boundary.length = length = hidden.shape[1]
        return with_backward(
            hidden,
            lambda x: own_slice(x, self.axis).contiguous(),
            lambda dy: all_gather_sequence(dy, self.axis, length),
        )

    def _slice_indices(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Give experts, which compute token by token, the tokens of this rank's slice alone."""
        length = self.boundary.length

        def own(x: Any) -> Any:
            is_index = isinstance(x, Tensor) and not x.is_floating_point() and x.dim() == 2 and x.shape[1] == length
            return local_sequence_slice(x, self.axis) if is_index else x

        return tuple(map(own, args)), {key: own(value) for key, value in kwargs.items()}

    def _gather(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the slices of every tensor of tokens. All ranks then compute the same, so gradients are sliced."""
        boundary, axis = self.boundary, self.axis
        part = positions_per_rank(boundary.length, axis)

        def gather(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.dim() < 3 or x.shape[1] != part or not x.is_floating_point():
                return x
            self.rows = x.shape[0]
            length = boundary.length
            return with_backward(
                x, lambda x: all_gather_sequence(x, axis, length), lambda dy: own_slice(dy, axis).contiguous()
            )

        return tuple(map(gather, args)), {key: gather(value) for key, value in kwargs.items()}

    def _keep_slice(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        axis, length, rows = self.axis, self.boundary.length, self.rows

        def keep(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                return x
            if x.dim() == 2 and x.shape[0] == rows * length:  # tokens in one dimension
                return keep(x.unflatten(0, (rows, length))).flatten(0, 1)
            if x.dim() < 3 or x.shape[:2] != (rows, length):
                return x
            return with_backward(
                x, lambda x: own_slice(x, axis).contiguous(), lambda dy: all_gather_sequence(dy, axis, length)
            )

        return type(output)(map(keep, output)) if isinstance(output, tuple | list) else keep(output)

    # -- dropout ------------------------------------------------------------------------------------------------------

    def _place_dropouts(self, sharded: set[str], whole: Iterable[str]) -> None:
        entered = self.entered

        def enter(where: str) -> Any:
            return lambda _module, _args: entered.append(where)

        def leave(_module: nn.Module, *_others: Any) -> None:
            entered[1:] = []

        for where, names in ((REGION, sharded), (WHOLE, whole)):
            for name in names:
                module = self.foreign.get_submodule(name)
                module.register_forward_pre_hook(enter(where))
                module.register_forward_hook(leave)
                for child in module.modules():
                    if isinstance(child, ReducedLinear) and where == REGION:
                        child.register_forward_hook(leave)
        adapters = {id(adapter.dropout) for _, adapter in iter_adapters(self.foreign)}
        for module in self.foreign.modules():
            if isinstance(module, RandomSite) and id(module) not in adapters:
                module.register_forward_pre_hook(lambda site, args: self._set_window(site, args[0], entered[-1]))

    def _set_window(self, site: Any, x: Tensor, where: str) -> None:
        size = self.axis.size
        dim = (1 if x.dim() == 4 else 2) if where == REGION else 1
        is_slice = where == BETWEEN and self.is_sequence_parallel and x.dim() == 3
        site.window = (
            {dim: (self.axis.index * x.shape[dim], size * x.shape[dim])} if where == REGION or is_slice else {}
        )


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
