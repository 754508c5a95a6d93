"""What a competent person writes by hand with torch alone: a plain loop, DDP, `fully_shard`.

Flags, chosen because each makes the peer faster on this benchmark or costs it nothing:

    AdamW        fused=True, two groups (matrices with decay, vectors without), zero_grad(set_to_none=True)
    DDP          gradient_as_bucket_view=True, static_graph=True; buckets of 25 MiB, the default
    clipping     torch's clip_grad_norm_, as nearly every run has it; by hand where ranks hold different parts
    fully_shard  every block, then the root; default resharding (blocks after forward, the root not)

A peer is a function from nothing to a step: `step(batch) -> loss`, of the global batch and its mean loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from model import CLIP, CONFIG, RULE, SEED, Batch
from torch import nn

from echelon import models
from echelon.optim.update_rule import resolve_betas

Step = Callable[[Batch], float]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.dim() >= 2], "weight_decay": RULE.weight_decay},
        {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RULE.lr, betas=resolve_betas(RULE), eps=RULE.eps, fused=True)


def plain() -> Step:
    model = models.build(CONFIG, seed=SEED)
    optimizer = adamw(model.parameters())

    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        total, count = model(**batch)
        loss = total / count
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return float(loss)

    return step


def ddp() -> Step:
    model = nn.parallel.DistributedDataParallel(
        models.build(CONFIG, seed=SEED), gradient_as_bucket_view=True, static_graph=True
    )
    return data_parallel_step(model, adamw(model.parameters()))


def fully_shard() -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as shard

    model: Any = models.build(CONFIG, seed=SEED)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        shard(block, mesh=mesh)
    shard(model, mesh=mesh)
    return data_parallel_step(model, adamw(model.parameters()))


def data_parallel_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    rank, world = dist.get_rank(), dist.get_world_size()

    def step(batch: Batch) -> float:
        rows = len(batch["tokens"]) // world
        mine = {key: value[rank * rows : (rank + 1) * rows] for key, value in batch.items()}
        optimizer.zero_grad()
        total, count = model(**mine)
        # Every row is full here, so the mean over ranks of local means is the mean over all targets.
        loss = total / count
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        shown = loss.detach()
        dist.all_reduce(shown)
        return float(shown) / world

    return step
