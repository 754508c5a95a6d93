"""`apply` parallelizes a one-device model: one rank's part of a layout. This list is the order of the transforms.

Each transform belongs to its strategy, which also decides whether the layout asks for it.
"""

from __future__ import annotations

from torch import nn

from echelon.faults.flight_recorder import FlightRecorder
from echelon.layout import Layout
from echelon.parallel.activation_checkpointing import apply_checkpointing
from echelon.parallel.cp.context_parallel import apply_context_parallel
from echelon.parallel.dp.data_parallel import shard_parameters
from echelon.parallel.dp.sync_batchnorm import apply_sync_batchnorm
from echelon.parallel.ep.expert_parallel import apply_expert_parallel
from echelon.parallel.mixed_precision import apply_fp8, compute_in_fp32, mark_fp32_params
from echelon.parallel.parallel_model import ParallelModel
from echelon.parallel.parallel_options import ParallelOptions
from echelon.parallel.regional_compile import compile_layers
from echelon.parallel.stage_modules import StageModules, keep_stage_modules
from echelon.parallel.tp_strategy import tp_strategy
from echelon.parallel.transform_context import TransformContext
from echelon.parallel.user_head import fuse_user_head


def apply(
    model: nn.Module,
    layout: Layout,
    options: ParallelOptions,
    stage_modules: StageModules | None = None,
    recorder: FlightRecorder | None = None,
) -> ParallelModel:
    """Lay `model` out on this rank, in place; `model.initial` draws parameters that are on the meta device.

    The engine calls it once, with the modules of each pipeline stage where the layout has pp.
    """
    context = TransformContext(
        model=model, layout=layout, options=options, stage_modules=stage_modules, recorder=recorder
    )
    mark_fp32_params(context)  # keep_fp32: which parameters stay float32
    tp_strategy(layout).apply_tensor_parallel(context)  # tp, sp, tensor grids
    apply_context_parallel(context)  # cp
    apply_expert_parallel(context)  # ep, etp
    apply_sync_batchnorm(context)  # BatchNorm statistics over dp
    keep_stage_modules(context)  # pp
    fuse_user_head(context)  # logits of a custom model that only its loss reads
    compile_layers(context)  # torch.compile of a user's layers
    apply_checkpointing(context)  # recompute
    apply_fp8(context)  # fp8 GEMMs
    compute_in_fp32(context)  # keep_fp32: casts around those modules
    shard_parameters(context)  # dp, zero, offload; draws the initial weights
    return ParallelModel.from_context(context)
