"""From a configuration to what the engine is given: types of torch, and what the loss is scaled by."""

from __future__ import annotations

from pathlib import Path

import torch

from echelon.config.run_config import Config
from echelon.layout import Layout
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.optim import offload_support
from echelon.optim.update_rule import UpdateRule
from echelon.parallel.parallel_options import ParallelOptions
from echelon.precision.loss_scale import LossScale
from echelon.training import update_strategies

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
        matmul_precision=asked.compute,
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


def validate_engine(
    rule: UpdateRule, layout: Layout, *, clip: float, master: torch.dtype, loss_scale: LossScale
) -> None:
    if rule.in_backward:
        update_strategies.check_in_backward_support(layout, clip, loss_scale)
    offload_support.check_offload(rule, layout.offload, master="none" if master.itemsize < 4 else "float32")
    if layout.pp == 1 or layout.schedule not in ASYNC_SCHEDULES:
        return
    if rule.ema:
        raise ValueError(
            f"older versions of the weights are under way when an evaluation would use their average "
            f"(schedule={layout.schedule}, optimizer.ema={rule.ema:g}); use schedule=1f1b, or ema=0"
        )
    if loss_scale.is_dynamic:
        raise ValueError(
            f"stages of schedule={layout.schedule} update at different times and could not agree on a loss scale; "
            "give a fixed one (precision.loss_scale=1024), or use schedule=1f1b"
        )
