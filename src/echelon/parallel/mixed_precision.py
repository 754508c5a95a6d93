"""Transforms of mixed precision: modules that stay float32, and linear layers that multiply in fp8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.memory.offload.cost import offloads_params
from echelon.models.layer_lists import layer_names
from echelon.models.traced.graph_model import GraphModel
from echelon.parallel.tp_strategy import tp_strategy
from echelon.precision import fp8_linear, keep_fp32

if TYPE_CHECKING:
    from echelon.parallel.transform_context import TransformContext


def mark_fp32_params(context: TransformContext) -> None:
    """Mark the parameters of the modules that `keep_fp32` names."""
    options = context.options
    if options.keep_fp32 and options.compute_dtype.itemsize < 4:
        _refuse_graph(context, "precision.keep_fp32")
        context.params = keep_fp32.mark_fp32_entries(context.model, context.params, options.keep_fp32)


def apply_fp8(context: TransformContext) -> None:
    """Make the linear layers inside the layers multiply in fp8."""
    model, layout, options = context.model, context.layout, context.options
    if options.matmul_precision == "same":
        return
    _refuse_graph(context, f"precision.compute={options.matmul_precision}")
    tp_strategy(layout).check_matmul_precision(layout, options.matmul_precision)
    fp8_linear.check_fp8(options.device, options.compute_dtype, options.kernels)
    # A cache would hold unsharded weights, which zero=3 and offload=params free after use.
    caches = layout.accumulate > 1 and layout.zero < 3 and not offloads_params(layout.offload)
    fp8_linear.apply_fp8(model, layer_names(model), options.matmul_precision, cache_weights=caches)


def compute_in_fp32(context: TransformContext) -> None:
    """Cast inputs and outputs of the modules that hold float32 parameters."""
    modules = keep_fp32.fp32_modules(context.params)
    keep_fp32.compute_in_float32(context.model, modules, context.options.compute_dtype)


def _refuse_graph(context: TransformContext, setting: str) -> None:
    """Raise for what changes modules, where a model runs operators of a traced graph."""
    if isinstance(context.model, GraphModel):
        raise ValueError(
            f"{setting} is incompatible with a model that runs from its traced graph "
            f"({type(context.model).__name__}); leave it out, or declare `split` and `pipeline_model()`"
        )
