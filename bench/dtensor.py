"""Tensor parallelism by torch's own recipe: `parallelize_module` and DTensor, as its tutorials and torchtitan write it.

The one-device model is used as it is, except that its head becomes a linear and a cross entropy, and that additions
stand outside the norms: what `ColwiseParallel`, `loss_parallel` and `SequenceParallel` understand.
The head's logits stay divided on both sides of the comparison.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import CLIP, CONFIG, SEED, Batch
from peers import Step, adamw
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from echelon import models
from echelon.models.layers import RMSNorm


class LinearHead(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.linear.weight = nn.Parameter(weight.detach())

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        logits = self.linear(hidden).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum"), targets.numel()


class PlainBlock(nn.Module):
    """A layer whose additions stand outside its norms, as `SequenceParallel` knows norms."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = (RMSNorm(len(norm.weight)) for norm in (block.norm1, block.norm2))
        self.norm1.weight, self.norm2.weight = block.norm1.weight, block.norm2.weight
        self.attn, self.mlp = block.attn, block.mlp

    def forward(self, x: Tensor, mask: Tensor | None, rotation: Any) -> Tensor:
        x = x + self.attn(self.norm1(x), mask, rotation)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


def whole_plan() -> dict[str, ParallelStyle]:
    """Between tensor-parallel regions every rank holds the full sequence."""
    return {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attn.q": ColwiseParallel(),
        "blocks.*.attn.k": ColwiseParallel(),
        "blocks.*.attn.v": ColwiseParallel(),
        "blocks.*.attn.o": RowwiseParallel(),
        "blocks.*.mlp.gate": ColwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head.linear": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


def sequence_plan() -> dict[str, ParallelStyle]:
    """Between regions every rank holds its part of the sequence."""
    return {
        **whole_plan(),
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm1": SequenceParallel(),
        "blocks.*.norm2": SequenceParallel(),
        "blocks.*.attn": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "blocks.*.mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "blocks.*.attn.o": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head.linear": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }


def whole() -> Step:
    return dtensor_step(whole_plan())


def sequence() -> Step:
    return dtensor_step(sequence_plan())


def clip(model: nn.Module) -> None:
    """torch's own clipping, in two parts: it does not take DTensors and plain tensors together."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    divided = nn.utils.get_total_norm([g for g in gradients if isinstance(g, DTensor)]).full_tensor()
    plain = [g for g in gradients if not isinstance(g, DTensor)]
    whole = nn.utils.get_total_norm(plain) if plain else torch.zeros(())
    norm = (divided.square() + whole.square()).sqrt()
    factor = (CLIP / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(factor)


def dtensor_step(plan: dict[str, ParallelStyle]) -> Step:
    model: Any = models.build(CONFIG, seed=SEED)
    model.head = LinearHead(model.head.weight)
    model.blocks = nn.ModuleList(PlainBlock(block) for block in model.blocks)
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    optimizer = adamw(model.parameters())

    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        with loss_parallel():
            total, count = model(**batch)
            loss = total / count
            loss.backward()
        clip(model)
        optimizer.step()
        return float(loss.item())

    return step
