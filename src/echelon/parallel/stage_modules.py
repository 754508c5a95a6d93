"""A stage's part of a model: everything else is taken away, under the names that the whole model has.

A weight that several ranks of pp hold (a tied embedding) stays on each of them. Its gradient is summed over them once
a step, so the copies stay equal; the first of them counts it in norms and writes it to disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from torch import nn

from echelon.layout.placement import LogicalParam
from echelon.models.pipeline_model import is_within


def tied_axis(holders: Sequence[int]) -> str:
    """The axis over which the copies of a weight are summed."""
    return f"pp[{'+'.join(map(str, holders))}]"


def stage_params(
    params: Iterable[LogicalParam], modules_by_rank: Sequence[Collection[str]], pp_rank: int
) -> list[LogicalParam]:
    """The entries that one rank of pp holds; `held` names the modules of every rank."""
    found = []
    for entry in params:
        names = [tuple(name for name in entry.names if _inside_any(name, modules)) for modules in modules_by_rank]
        holders = tuple(rank for rank, mine in enumerate(names) if mine)
        if pp_rank not in holders:
            continue
        entry = replace(entry, names=names[pp_rank])
        if len(holders) > 1:
            entry = replace(
                entry, tied_pp_ranks=holders, partial_grad_axes=(*entry.partial_grad_axes, tied_axis(holders))
            )
        found.append(entry)
    return found


def prune_modules(model: nn.Module, modules: Collection[str]) -> None:
    """Takes away every module and parameter that is neither one of these nor contains or belongs to one."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not name or _inside_any(name, modules):
            continue
        parent_name, _, attribute = name.rpartition(".")
        if parent_name and not _around_any(parent_name, modules):
            continue  # went with its parent
        if not _around_any(name, modules):
            # Lists keep their places, so that what stays keeps its name.
            setattr(model.get_submodule(parent_name), attribute, nn.Identity())
        else:
            _prune_parameters(module, name, modules)
    _prune_parameters(model, "", modules)


def _prune_parameters(module: nn.Module, name: str, modules: Collection[str]) -> None:
    for own, _ in list(module.named_parameters(recurse=False)):
        if not _inside_any(f"{name}.{own}" if name else own, modules):
            module.register_parameter(own, None)


def _inside_any(name: str, modules: Iterable[str]) -> bool:
    return any(is_within(name, other) for other in modules)


def _around_any(name: str, modules: Iterable[str]) -> bool:
    return any(is_within(other, name) for other in modules)
