"""How one rank runs an operator on what it holds: sizes that the code states become the rank's own.

[Note: operators that need more than local sizes]

    row-parallel linear, convolution   one rank alone adds the bias. The gradient of a partial sum is that of the whole
                                       sum on every rank, so the bias gets its full gradient on each of them
    vocabulary-parallel lookup         a row that another rank holds is zero here
    cross-entropy of sharded logits    vocab_cross_entropy.py
    mean over a sharded dimension      the mean of a slice, divided by the number of ranks
    dropout                            the part of the mask at the place of the rank's slice
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from echelon.models.traced.traced_graph import TracedOp
from echelon.parallel.auto_sharding.elementwise_rules import reduced_dims
from echelon.parallel.auto_sharding.op_facts import OpFacts
from echelon.parallel.auto_sharding.shape_rules import is_reshape
from echelon.parallel.auto_sharding.shard_conversion import local_shape, own_slice
from echelon.parallel.auto_sharding.sharding import Sharding, Strategy, shard
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.tp.vocab_cross_entropy import local_row_index, vocab_parallel_cross_entropy
from echelon.rng import PartialDims

VIEWS = ("view", "reshape", "_unsafe_view")
LocalCall = Callable[..., Any]


def local_call(facts: OpFacts, strategy: Strategy, axis: MeshAxis) -> LocalCall:
    """The function that a rank calls in place of the operator's, with the arguments of the trace."""
    op, target = facts.op, facts.op.target
    assert callable(target)
    state = dict(zip(op.inputs, strategy.inputs, strict=True))
    first = state.get(op.inputs[0]) if op.inputs else None
    own_shape = local_shape(op.shape, strategy.output, axis.size)
    if op.op in VIEWS and is_reshape(
        facts
    ):  # a slice may lie in memory otherwise than the whole did: reshape copies where it must
        return lambda x, *_shape: x.reshape(own_shape)
    if op.op == "expand":
        return _with_arg(target, 1, list(own_shape))
    if first is None or all(each.kind != "S" for each in strategy.inputs):
        return target
    if (
        op.op in ("split", "split_with_sizes")
        and first.kind == "S"
        and first.dim == facts.arg(2, "dim", 0) % len(facts.shape_of(0))
    ):
        sizes = facts.arg(1)
        local: Any = sizes // axis.size if isinstance(sizes, int) else [size // axis.size for size in sizes]
        return _with_arg(target, 1, local)
    if op.op == "group_norm" and first.kind == "S" and first.dim == 1:
        return _with_arg(target, 1, int(facts.arg(1)) // axis.size)
    if op.op.startswith("conv"):
        return _convolution(facts, strategy, axis)
    if op.op == "linear" and strategy.output.kind == "P" and first.kind == "S":
        return _biased_once(lambda x, weight: F.linear(x, weight), (-1,), axis)
    if op.op == "embedding" and strategy.output.kind == "P" and first.kind == "S":
        return _vocab_lookup(facts, axis)
    if op.op == "cross_entropy_loss" and first.kind == "S" and first.dim == 1:
        return _vocab_cross_entropy(facts, axis)
    if op.op == "mean" and first.kind == "S" and first.dim in reduced_dims(facts):
        return lambda *args, **kwargs: target(*args, **kwargs) / axis.size
    if op.op in ("mse_loss", "l1_loss") and int(facts.arg(2, "reduction", 1)) == 1:
        return lambda *args, **kwargs: target(*args, **kwargs) / axis.size
    return target


def _with_arg(target: Callable[..., Any], index: int, value: Any) -> LocalCall:
    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args[:index], value, *args[index + 1 :], **kwargs)

    return call


def _biased_once(product: Callable[[Tensor, Tensor], Tensor], shape: Sequence[int], axis: MeshAxis) -> LocalCall:
    """See [Note: operators that need more than local sizes]."""

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None, *_others: Any) -> Tensor:
        partial_sum = product(x, weight)
        if bias is None:
            return partial_sum
        return partial_sum + (bias if axis.index == 0 else bias - bias.detach()).view(tuple(shape))

    return call


def _convolution(facts: OpFacts, strategy: Strategy, axis: MeshAxis) -> LocalCall:
    target: Any = facts.op.target
    settings, is_grouped = facts.op.args[3:], int(facts.arg(6, "groups", 1)) > 1
    if strategy.output.kind == "P":
        shape = (-1, *[1] * (len(facts.shape) - 2))
        return _biased_once(lambda x, weight: target(x, weight, None, *settings), shape, axis)
    if is_grouped and strategy.inputs[0] == strategy.output == shard(1):
        return _with_arg(target, 6, int(facts.arg(6)) // axis.size)
    return target  # type: ignore[no-any-return]


def _vocab_lookup(facts: OpFacts, axis: MeshAxis) -> LocalCall:
    vocab_size, padding = facts.shape_of(0)[0], int(facts.arg(2, "padding_idx", -1))

    def lookup(table: Tensor, ids: Tensor, *_others: Any) -> Tensor:
        rows = table.shape[0]
        local, is_remote = local_row_index(ids, axis.index * rows, rows, vocab_size)
        found = F.embedding(local, table).masked_fill(is_remote[..., None], 0.0)
        if padding < 0:
            return found
        return torch.where((ids == padding)[..., None], found.detach(), found)  # its row has no gradient

    return lookup


def _vocab_cross_entropy(facts: OpFacts, axis: MeshAxis) -> LocalCall:
    vocab_size, reduce = facts.shape_of(0)[1], int(facts.arg(3, "reduction", 1))

    def loss(logits: Tensor, targets: Tensor, *_others: Any) -> Tensor:
        losses = vocab_parallel_cross_entropy(logits, targets, axis, vocab_size).to(logits.dtype)
        if reduce == 0:
            return losses
        return losses.sum() if reduce == 2 else losses.sum() / (targets != -100).sum()

    return loss


def dropout_window(op: TracedOp, state: Sharding, axis: MeshAxis) -> PartialDims:
    """The part of a dropout's tensor that a rank has: by dimension, its first index or all, and the full size."""
    if state.kind != "S":
        return {}
    size = op.shape[state.dim]
    if state.blocks == 1:
        return {state.dim: (axis.index * (size // axis.size), size)}
    return {state.dim: (own_slice(torch.arange(size), shard(0, state.blocks), axis), size)}
