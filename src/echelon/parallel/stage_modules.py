"""Transform of pipeline parallelism: a rank keeps the modules of its stages, under the names of the full model.

A weight that several pp ranks hold (a tied embedding) stays on each of them. Its gradient is all-reduced over them once
a step, so the copies stay equal; the first of them counts it in norms and writes it to disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from echelon.layout.placement import LogicalParam
from echelon.models.pipeline_model import is_within

if TYPE_CHECKING:
    from echelon.parallel.transform_context import TransformContext


@dataclass(frozen=True, kw_only=True)
class StageModules:
    """Names of the modules that each pp rank holds."""

    by_pp_rank: tuple[frozenset[str], ...]
    """modules of every pp rank"""
    by_stage: tuple[tuple[str, ...], ...]
    """modules of each stage of this rank"""
    in_flight: tuple[tuple[int, ...], ...] = ()
    """microbatches between forward and backward on each stage of this rank, at every moment that may be the peak"""


def keep_stage_modules(context: TransformContext) -> None:
    """Remove the modules and parameters of other pp ranks."""
    modules, axes = context.stage_modules, context.axes
    if modules is None:
        return
    by_rank = [stage_params(context.params, modules.by_pp_rank, rank) for rank in range(context.layout.pp)]
    tied = {tied_axis(param.tied_pp_ranks) for params in by_rank for param in params if param.tied_pp_ranks}
    for name in sorted(tied):
        axes.add(name)
    pp_rank = axes.coordinates["pp"]
    context.params = by_rank[pp_rank]
    prune_modules(context.model, modules.by_pp_rank[pp_rank])


def tied_axis(pp_ranks: Sequence[int]) -> str:
    """Return the axis over which the gradients of a tied weight's copies are summed."""
    return f"pp[{'+'.join(map(str, pp_ranks))}]"


def stage_params(
    params: Iterable[LogicalParam], modules_by_rank: Sequence[Collection[str]], pp_rank: int
) -> list[LogicalParam]:
    """Return the parameters that one pp rank holds, given the modules of every rank."""
    local_params = []
    for param in params:
        names = [tuple(name for name in param.names if _inside_any(name, modules)) for modules in modules_by_rank]
        holders = tuple(rank for rank, names_on_rank in enumerate(names) if names_on_rank)
        if pp_rank not in holders:
            continue
        param = replace(param, names=names[pp_rank])
        if len(holders) > 1:
            partial_axes = (*param.partial_grad_axes, tied_axis(holders))
            param = replace(param, tied_pp_ranks=holders, partial_grad_axes=partial_axes)
        local_params.append(param)
    return local_params


def prune_modules(model: nn.Module, modules: Collection[str]) -> None:
    """Remove every module and parameter that is neither one of `modules` nor contains or belongs to one."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not name or _inside_any(name, modules):
            continue
        parent_name, _, attribute = name.rpartition(".")
        if parent_name and not _contains_any(parent_name, modules):
            continue  # removed with its parent
        if not _contains_any(name, modules):
            # Lists keep their length, so that the remaining elements keep their names.
            setattr(model.get_submodule(parent_name), attribute, nn.Identity())
        else:
            _prune_parameters(module, name, modules)
    _prune_parameters(model, "", modules)


def _prune_parameters(module: nn.Module, name: str, modules: Collection[str]) -> None:
    for attribute, _ in list(module.named_parameters(recurse=False)):
        if not _inside_any(f"{name}.{attribute}" if name else attribute, modules):
            module.register_parameter(attribute, None)


def _inside_any(name: str, modules: Iterable[str]) -> bool:
    return any(is_within(name, other) for other in modules)


def _contains_any(name: str, modules: Iterable[str]) -> bool:
    return any(is_within(other, name) for other in modules)
