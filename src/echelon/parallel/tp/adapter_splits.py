"""How tensor parallelism divides LoRA adapters: as the linear that they are beside.

    linear            A [rank, in]                     B [out, rank]                   the adapter's output
    column-parallel   replicated, partial gradient     split as the weight's rows      this rank's columns
    row-parallel      split as the weight's columns    replicated, partial gradient    a partial sum, inside `leave`
    not split         as the weight                    as the weight                   as the linear's

A gradient is partial where a rank sees its part of the other factor alone. So adapters add no collective to a layer,
only the all-reduce of these gradients once a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from echelon.layout.placement import LogicalParam
from echelon.models.lora.adapter import ADAPTER, LoRAAdapter, iter_adapters
from echelon.parallel.tp.tp_collectives import RegionBoundary, SequenceParallelBoundary, positions_per_rank
from echelon.rng import Dropout

PARTIAL = ("tp",)
"""the axis over which the gradient of a replicated factor is a partial sum"""


def split_adapters(model: nn.Module, params: Iterable[LogicalParam], boundary: RegionBoundary) -> list[LogicalParam]:
    """Split the adapters' parameters after their linears', and place their dropouts."""
    given = list(params)
    by_name = {name: param for param in given for name in param.names}
    changed: dict[str, LogicalParam] = {}
    for linear, adapter in iter_adapters(model):
        weights = [by_name[name] for name in _weight_names(linear, adapter, by_name)]
        pairs = [
            _split_factors(by_name[f"{linear}.{ADAPTER}.A"], by_name[f"{linear}.{ADAPTER}.B.{i}"], weight, adapter)
            for i, weight in enumerate(weights)
        ]
        changed.update((param.name, param) for pair in pairs for param in pair)
        _place_dropout(adapter, boundary, has_sharded_inputs=bool(pairs[0][0].splits))
    return [changed.get(param.name, param) for param in given]


def _weight_names(linear: str, adapter: LoRAAdapter, known: Any) -> list[str]:
    """The weight of a linear, or those of a fused linear's parts."""
    whole = f"{linear}.weight"
    return [whole] if whole in known else [f"{linear}.{part}.weight" for part in range(len(adapter.B))]


def _split_factors(
    a: LogicalParam, b: LogicalParam, weight: LogicalParam, adapter: LoRAAdapter
) -> tuple[LogicalParam, LogicalParam]:
    if not weight.splits:
        axes = weight.partial_grad_axes
        return replace(a, partial_grad_axes=axes), replace(b, partial_grad_axes=axes)
    (cut,) = weight.splits
    if cut.dim == adapter.output_dim:
        columns = replace(b, splits=(replace(cut, dim=0),), partial_grad_axes=weight.partial_grad_axes)
        return replace(a, partial_grad_axes=PARTIAL), columns
    return replace(a, splits=(replace(cut, dim=1),), partial_grad_axes=()), replace(b, partial_grad_axes=PARTIAL)


def _place_dropout(adapter: LoRAAdapter, boundary: RegionBoundary, *, has_sharded_inputs: bool) -> None:
    """Give the dropout the window of its input: a rank's features, or its slice of the sequence between regions."""
    axis = boundary.axis

    def set_window(site: Any, args: tuple[Tensor, ...]) -> None:
        shape, window = args[0].shape, {}
        if has_sharded_inputs:
            window[len(shape) - 1] = (axis.index * shape[-1], axis.size * shape[-1])
        if isinstance(boundary, SequenceParallelBoundary) and len(shape) > 2:
            part = positions_per_rank(boundary.length, axis)
            if shape[1] == part != boundary.length:
                window[1] = (axis.index * part, axis.size * part)
        site.window = window

    if isinstance(adapter.dropout, Dropout) and adapter.dropout.p > 0:
        adapter.dropout.register_forward_pre_hook(set_window)
