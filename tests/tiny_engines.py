"""Tiny models on a layout, for the ranks of the pool, and logical tensors assembled from all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.models.model_config import ModelConfig
from echelon.parallel.comm.axis_names import WORLD_AXIS
from echelon.parallel.parallel_model import ParallelModel
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine

SGD = OptimizerConfig(name="sgd", lr=0.1)


def tiny(family: str = "llama", **changes: object) -> ModelConfig:
    """Two layers with grouped keys and values, and a vocabulary that divides by nothing."""
    shape = {"layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 257, "max_seq_len": 32}
    return ModelConfig(name="tiny", family=family, **(shape | changes))


def float64(**changes: object) -> ParallelOptions:
    return ParallelOptions(compute_dtype=torch.float64, master_dtype=torch.float64, **changes)


def engine_of(shape: ModelConfig, layout: str, *, optimizer: OptimizerConfig = SGD, clip: float = 0.0) -> Engine:
    engine = Engine(models.build(shape, "meta", dtype=torch.float64), layout, optimizer, clip=clip, options=float64())
    engine.model.train()
    return engine


def one_device(shape: ModelConfig) -> nn.Module:
    return models.build(shape, "cpu", dtype=torch.float64).train()


def batch_of(shape: ModelConfig, rows: int, length: int = 9, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, shape.vocab, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:].clone()}


def whole(parallel: ParallelModel, kind: str = "grad") -> dict[str, Tensor]:
    """Every logical tensor of a kind (`grad`, `master`), from the pieces that ranks own; equal on all ranks."""
    mine = {}
    for unit, piece in parallel.sharded_model.pieces():
        entry = piece.param
        local = torch.zeros(entry.local_numel, dtype=torch.float64)
        if piece.is_owner and piece.is_first_replica:
            values = unit.master.values() if kind == "master" else unit.grad
            local[piece.start : piece.stop] = parallel.sharded_model.piece_view(values, piece)
        out = torch.zeros(entry.shape, dtype=torch.float64)
        real = tuple(slice(0, high - low) for low, high in piece.box)
        out[tuple(slice(low, high) for low, high in piece.box)] = local.view(entry.local_shape)[real]
        mine[entry.name] = out
    if parallel.axes[WORLD_AXIS].size == 1:
        return mine
    every: list[dict[str, Tensor]] = [{} for _ in parallel.axes[WORLD_AXIS].ranks]
    dist.all_gather_object(every, mine)
    names = dict.fromkeys(name for found in every for name in found)  # stages hold different ones
    return {name: torch.stack([found[name] for found in every if name in found]).sum(0) for name in names}


def error(value: Tensor, truth: Tensor) -> float:
    """max|a-b| / max(1, max|b|)."""
    assert value.shape == truth.shape, (value.shape, truth.shape)
    return float((value - truth).abs().max()) / max(1.0, float(truth.abs().max()))


def largest_error(values: dict[str, Tensor], truths: dict[str, Tensor]) -> float:
    assert values.keys() == truths.keys()
    return max(error(values[name], truth) for name, truth in truths.items())
