"""From a configuration to what the engine is given: types of torch, and what the loss is scaled by."""

from __future__ import annotations

from pathlib import Path

import torch

from echelon.config.run_config import Config
from echelon.parallel.apply import ParallelOptions
from echelon.precision.loss_scale import LossScale

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
MIB = 1 << 20


def parallel_options(config: Config, device: torch.device) -> ParallelOptions:
    compute, asked = DTYPES[config.dtype], config.precision
    reduce = {"master": None, "same": compute}.get(asked.reduce, DTYPES.get(asked.reduce))
    return ParallelOptions(
        device=device,
        compute_dtype=compute,
        master_dtype=compute if asked.master == "none" else torch.promote_types(compute, torch.float32),
        reduce_dtype=reduce,
        keep_fp32=asked.keep_fp32,
        products=asked.compute,
        kernels=config.kernels,
        compress=config.compress,
        seed=config.seed,
        reshard_after_forward=config.shard.reshard_after_forward,
        prefetch=config.shard.prefetch,
        units=config.shard.units,
        stage_layers=config.pipeline.layers,
        slice_lengths=config.pipeline.slices,
        partition=config.memory.partition,
        arena=config.memory.arena,
        max_group_bytes=int(config.memory.buffer * MIB),
        host_share=config.memory.host,
        disk_dir=config.memory.disk or str(Path(config.run or "runs/run").parent / "offload"),
    )


def loss_scale_settings(config: Config) -> LossScale:
    asked = config.precision
    if isinstance(asked.loss_scale, float):
        return LossScale(start=asked.loss_scale)
    if config.loss_scaling == "dynamic":
        return LossScale.dynamic(start=asked.scale_start, every=asked.scale_every)
    return LossScale()
