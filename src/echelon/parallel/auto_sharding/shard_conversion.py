"""Moves a tensor from one state to another on the ranks of an axis: the collectives of sharding.py, executed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from echelon.parallel.auto_sharding.sharding import Sharding
from echelon.parallel.comm.autograd_collective import with_backward
from echelon.parallel.comm.mesh_axis import MeshAxis


def convert(x: Tensor, source: Sharding, target: Sharding, axis: MeshAxis) -> Tensor:
    """Return what this rank holds in `target` of a tensor of which it holds `x` in `source`."""
    if source == target:
        return x
    if x.is_complex():  # collectives move real numbers
        return torch.view_as_complex(convert(torch.view_as_real(x), source, target, axis).contiguous())
    forward, backward = _exchanges(source, target, axis)
    return with_backward(x, forward, backward) if x.requires_grad else forward(x)


Exchange = Callable[[Tensor], Tensor]


def _exchanges(source: Sharding, target: Sharding, axis: MeshAxis) -> tuple[Exchange, Exchange]:
    """What happens to the tensor in forward, and to its gradient in backward."""
    kinds = source.kind + target.kind
    if kinds == "RB":
        return _same, partial(_all_reduce, axis=axis)
    if kinds == "PR":
        return partial(_all_reduce, axis=axis), _same
    if kinds == "PB":
        return partial(_all_reduce, axis=axis), partial(_all_reduce, axis=axis)
    if kinds == "RS":
        return partial(own_slice, state=target, axis=axis), partial(_all_gather, state=target, axis=axis)
    if kinds == "BS":
        return partial(own_slice, state=target, axis=axis), partial(_pad_slice, state=target, axis=axis)
    if kinds == "SR":
        return partial(_all_gather, state=source, axis=axis), partial(own_slice, state=source, axis=axis)
    if kinds == "SB":
        return partial(_all_gather, state=source, axis=axis), partial(_reduce_scatter, state=source, axis=axis)
    if kinds == "PS":
        return partial(_reduce_scatter, state=target, axis=axis), partial(_all_gather, state=target, axis=axis)
    if kinds == "SS" and source.dim != target.dim:
        return (
            partial(_all_to_all, source=source, target=target, axis=axis),
            partial(_all_to_all, source=target, target=source, axis=axis),
        )
    if kinds == "SS":
        return partial(_regroup, source=source, target=target, axis=axis), partial(
            _regroup, source=target, target=source, axis=axis
        )
    raise ValueError(f"no collective makes {target} of {source}")


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, axis: MeshAxis) -> Tensor:
    return axis.all_reduce(x.clone(memory_format=torch.contiguous_format))


def rank_dim_first(x: Tensor, state: Sharding, num_ranks: int) -> Tensor:
    """A full tensor as [ranks, *local shape]: what each rank holds of it."""
    size = x.shape[state.dim]
    parts: Tensor = x.unflatten(state.dim, (state.blocks, num_ranks, size // (state.blocks * num_ranks)))
    return parts.movedim(state.dim + 1, 0).flatten(state.dim + 1, state.dim + 2)


def _from_rank_dim(parts: Tensor, state: Sharding) -> Tensor:
    """The full tensor from [ranks, *local shape]."""
    local = parts.shape[state.dim + 1]
    by_block: Tensor = parts.unflatten(state.dim + 1, (state.blocks, local // state.blocks))
    return by_block.movedim(0, state.dim + 1).flatten(state.dim, state.dim + 2)


def own_slice(x: Tensor, state: Sharding, axis: MeshAxis) -> Tensor:
    """This rank's slice of a full tensor."""
    return rank_dim_first(x, state, axis.size)[axis.index].contiguous()


def _all_gather(x: Tensor, state: Sharding, axis: MeshAxis) -> Tensor:
    return _from_rank_dim(axis.all_gather(x.contiguous()), state).contiguous()


def _pad_slice(x: Tensor, state: Sharding, axis: MeshAxis) -> Tensor:
    """A full tensor of zeros but for this rank's slice."""
    parts = x.new_zeros(axis.size, *x.shape)
    parts[axis.index] = x
    return _from_rank_dim(parts, state)


def _reduce_scatter(x: Tensor, state: Sharding, axis: MeshAxis) -> Tensor:
    parts = rank_dim_first(x, state, axis.size).contiguous()
    shard = torch.empty_like(parts[0])
    axis.start_reduce_scatter(shard.view(-1), parts.view(-1)).wait()
    return shard


def _all_to_all(x: Tensor, source: Sharding, target: Sharding, axis: MeshAxis) -> Tensor:
    """Each rank keeps its slice of `target`'s dimension and gets all of `source`'s."""
    sent = rank_dim_first(x, target, axis.size).contiguous()
    received = torch.empty_like(sent)
    axis.start_all_to_all(received.view(axis.size, -1), sent.view(axis.size, -1)).wait()
    return _from_rank_dim(received, source).contiguous()


def _regroup(x: Tensor, source: Sharding, target: Sharding, axis: MeshAxis) -> Tensor:
    return own_slice(_all_gather(x, source, axis), target, axis)


def local_shape(shape: Sequence[int], state: Sharding, num_ranks: int) -> tuple[int, ...]:
    """The shape of what a rank holds."""
    if state.kind != "S":
        return tuple(shape)
    return tuple(size // num_ranks if dim == state.dim else size for dim, size in enumerate(shape))
