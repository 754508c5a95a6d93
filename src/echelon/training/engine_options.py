"""Options of an engine: from the configuration, and which of them are incompatible."""

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

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
MIB = 1 << 20


def parallel_options(config: Config, device: torch.device) -> ParallelOptions:
    """Translate the configuration into options of `apply`."""
    compute, precision = DTYPES[config.dtype], config.precision
    reduce = {"master": None, "same": compute}.get(precision.reduce, DTYPES.get(precision.reduce))
    return ParallelOptions(
        device=device,
        compute_dtype=compute,
        master_dtype=compute if precision.master == "none" else torch.promote_types(compute, torch.float32),
        reduce_dtype=reduce,
        keep_fp32=precision.keep_fp32,
        matmul_precision=precision.compute,
        kernels=config.kernels,
        cuda_graphs=config.cuda_graphs,
        compile=config.compile,
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
    """Translate `precision.loss_scale` and its companions."""
    precision = config.precision
    if isinstance(precision.loss_scale, float):
        return LossScale(start=precision.loss_scale)
    if config.loss_scaling == "dynamic":
        return LossScale.dynamic(start=precision.scale_start, every=precision.scale_every)
    return LossScale()


def validate_engine(
    rule: UpdateRule, layout: Layout, *, clip: float, master: torch.dtype, loss_scale: LossScale
) -> None:
    """Raise ValueError where options of an engine are incompatible with each other."""
    if rule.in_backward:
        _check_update_in_backward(layout, clip, loss_scale)
    offload_support.check_offload(rule, layout.offload, master="none" if master.itemsize < 4 else "float32")
    if layout.pp == 1 or layout.schedule not in ASYNC_SCHEDULES:
        return
    if rule.ema:
        raise ValueError(
            f"evaluation cannot use averaged weights while older versions of the weights are in flight "
            f"(schedule={layout.schedule}, optimizer.ema={rule.ema:g}); use schedule=1f1b, or ema=0"
        )


def _check_update_in_backward(layout: Layout, clip: float, loss_scale: LossScale) -> None:
    if clip:
        raise ValueError(
            f"clipping requires the norm of all gradients, and updates in backward free gradients before it is known "
            f"(clip={clip:g}, optimizer.in_backward=true); use clip=0"
        )
    if loss_scale.is_dynamic:
        raise ValueError(
            "a dynamic loss scale skips steps whose gradients overflow, and updates in backward happen before that is "
            "known (optimizer.in_backward=true); use precision.loss_scale=1024, or dtype=bfloat16"
        )
    if layout.pp > 1:
        raise ValueError(
            "in a pipeline gradients of several microbatches accumulate until the last one, and only the last stage "
            f"knows the number of targets (pp={layout.pp}, optimizer.in_backward=true); use pp=1"
        )
