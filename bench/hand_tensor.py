"""Tensor parallelism by hand: the benchmark's Llama written again for one rank of a group, with raw collectives.

    all_reduce layers   every rank holds the whole sequence between regions
    sequence layers     every rank holds half of it: all-gather into a region, reduce-scatter out of it

As Megatron does it: one boundary before q, k and v together, vocabulary-parallel embedding and loss, in-place
collectives. Attention and rotary positions are the functions of the one-device model: both sides run the same kernels.
Nothing here is general: sizes divide, there is no padding, no dropout, no bias.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import CLIP, CONFIG, SEED, Batch
from peers import Step, adamw
from torch import Tensor, nn
from torch.autograd import Function

from echelon import models
from echelon.models.attention import Rotation, apply_rotary, document_positions, rope_angles
from echelon.models.model_config import NORM_EPSILON, ROPE_THETA

# Renamed in torch 2.13; the old names warn there.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(x: Tensor) -> Tensor:
    """[B, T / world, C] to [B, T, C]."""
    parts = x.new_empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
    all_gather_single(parts, x.contiguous())
    return torch.cat(parts.chunk(dist.get_world_size()), dim=1)


def scatter(x: Tensor) -> Tensor:
    """[B, T, C] to the sum's [B, T / world, C]."""
    parts = torch.cat(x.chunk(dist.get_world_size(), dim=1))
    out = x.new_empty(x.shape[0], x.shape[1] // dist.get_world_size(), *x.shape[2:])
    reduce_scatter_single(out, parts)
    return out


class CopyIn(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient)
        return gradient


class ReduceOut(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class GatherIn(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return scatter(gradients[0])


class ScatterOut(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return scatter(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gather(gradients[0])


class CrossEntropy(Function):
    """The sum of losses from this rank's columns of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        logits.sub_(largest[:, None])  # the product that made the logits does not need them in backward
        local = targets - dist.get_rank() * logits.shape[1]
        here = (local >= 0) & (local < logits.shape[1])
        local = torch.where(here, local, 0)
        picked = torch.where(here, logits.gather(1, local[:, None])[:, 0], 0.0)
        logits.exp_()
        sums = torch.stack((logits.sum(-1), picked))
        dist.all_reduce(sums)
        ctx.save_for_backward(logits.div_(sums[0][:, None]), local, here)
        return (sums[0].log() - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        out, local, here = ctx.saved_tensors
        out.scatter_add_(1, local[:, None], -here[:, None].to(out.dtype))
        return out.mul_(gradients[0]), None


class Block(nn.Module):
    def __init__(self, part: Any, enter: Any, leave: Any) -> None:
        super().__init__()
        self.enter, self.leave = enter, leave
        self.norm1, self.norm2 = own(part.norm1.weight), own(part.norm2.weight)
        self.q, self.k, self.v = own(part.attn.q.weight, 0), own(part.attn.k.weight, 0), own(part.attn.v.weight, 0)
        self.o = own(part.attn.o.weight, 1)
        self.gate, self.up = own(part.mlp.gate.weight, 0), own(part.mlp.up.weight, 0)
        self.down = own(part.mlp.down.weight, 1)

    def forward(self, x: Tensor, turn: Rotation) -> Tensor:
        x = x + self.leave(F.linear(self.attend(self.enter(rms(x, self.norm1)), turn), self.o))
        h = self.enter(rms(x, self.norm2))
        out: Tensor = x + self.leave(F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down))
        return out

    def attend(self, h: Tensor, turn: Rotation) -> Tensor:
        q, k, v = (
            F.linear(h, w).view(*h.shape[:2], -1, CONFIG.head_dim).transpose(1, 2) for w in (self.q, self.k, self.v)
        )
        q, k = apply_rotary(q, turn), apply_rotary(k, turn)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


class HandLlama(nn.Module):
    def __init__(self, whole: Any, *, sequence: bool) -> None:
        super().__init__()
        self.enter = GatherIn.apply if sequence else CopyIn.apply
        self.leave = ScatterOut.apply if sequence else ReduceOut.apply
        self.embed, self.head = own(whole.embed.weight, 0), own(whole.head.weight, 0)
        self.norm = own(whole.norm.weight)
        self.blocks = nn.ModuleList(Block(block, self.enter, self.leave) for block in whole.blocks)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        local = tokens - dist.get_rank() * len(self.embed)
        here = (local >= 0) & (local < len(self.embed))
        x = self.leave(F.embedding(torch.where(here, local, 0), self.embed) * here[..., None])
        turn = rope_angles(document_positions(tokens, None), CONFIG.head_dim, ROPE_THETA, x.dtype)
        for block in self.blocks:
            x = block(x, turn)
        logits = F.linear(self.enter(rms(x, self.norm)), self.head)
        loss: Tensor = CrossEntropy.apply(logits.flatten(0, 1), targets.flatten())
        return loss / targets.numel()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, NORM_EPSILON)


def own(weight: Tensor, dim: int | None = None) -> nn.Parameter:
    """This rank's slice of a full weight, or all of it."""
    part = weight if dim is None else weight.chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return nn.Parameter(part.detach().clone(memory_format=torch.contiguous_format))


def all_reduce_layers() -> Step:
    return hand_step(HandLlama(models.build(CONFIG, seed=SEED), sequence=False), sequence=False)


def sequence_layers() -> Step:
    return hand_step(HandLlama(models.build(CONFIG, seed=SEED), sequence=True), sequence=True)


def hand_step(model: HandLlama, *, sequence: bool) -> Step:
    optimizer = adamw(model.parameters())
    vectors = [p for p in model.parameters() if p.dim() == 1]  # whole on every rank; matrices are divided
    matrices = [p for p in model.parameters() if p.dim() == 2]

    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        if sequence:  # each rank's vectors saw half of the tokens
            together = torch.cat([p.grad for p in vectors if p.grad is not None])
            dist.all_reduce(together)
            for parameter, gradient in zip(vectors, together.split([p.numel() for p in vectors]), strict=True):
                parameter.grad = gradient
        divided = nn.utils.get_total_norm([p.grad for p in matrices if p.grad is not None]).square()
        dist.all_reduce(divided)
        whole = nn.utils.get_total_norm([p.grad for p in vectors if p.grad is not None]).square()
        nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, (divided + whole).sqrt())
        optimizer.step()
        return loss.item()

    return step
