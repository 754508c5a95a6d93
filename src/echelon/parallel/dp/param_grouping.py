"""Which modules form parameter groups, the units in which FSDP gathers, frees and reduces parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from echelon.models.layer_lists import listed_layers, outermost
from echelon.models.pipeline_model import is_within

if TYPE_CHECKING:
    from torch import nn

MODULE_LISTS = ("ModuleList", "ModuleDict")


def choose_param_groups(model: nn.Module, patterns: Sequence[str] = (), *, max_numel: int = 0) -> dict[str, bool]:
    """Return the modules that form parameter groups, and whether each stays unsharded from forward to backward.

    With patterns, the modules that match them; a pattern that matches nothing is an error. Otherwise the elements of
    lists of layers, and modules as large as one. Modules outside lists stay unsharded, as the root group does: only
    elements of a list are sure to be used through their own forward, where hooks gather them
    (`F.linear(x, self.embed.weight)` calls no module). Small modules join the root group, since a small collective is
    all latency.

    A layer of more than `max_numel` elements is split into its submodules, down to those that own parameters directly.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    if patterns:
        return dict.fromkeys(outermost(_matching_modules(modules, patterns)), False)
    listed = [name for name in listed_layers(model) if name in modules]  # one that repeats has its first name
    children = [name for name, _ in model.named_children() if not any(is_within(layer, name) for layer in listed)]
    sizes = {name: sum(p.numel() for p in modules[name].parameters()) for name in [*listed, *children]}
    min_numel = max(max((sizes[name] for name in listed or children), default=0) / 2, 1)
    chosen = {name: name not in listed for name in outermost(n for n in modules if sizes.get(n, 0) >= min_numel)}
    if not max_numel:
        return chosen
    return {
        part: stays_unsharded
        for name, stays_unsharded in chosen.items()
        for part in ([name] if stays_unsharded else _split_module(modules, name, max_numel))
    }


def _split_module(modules: Mapping[str, nn.Module], name: str, max_numel: int) -> list[str]:
    """Return the largest submodules of at most `max_numel` elements, or that own parameters directly.

    A submodule a hundred times smaller joins the root group.
    """
    module = modules[name]
    size = sum(p.numel() for p in module.parameters())
    owns_params = any(True for _ in module.parameters(recurse=False))
    if size <= max_numel or owns_params:
        return [name] if 100 * size >= max_numel else []
    children = [f"{name}.{child}" for child, _ in module.named_children()]
    if not children and type(module).__name__ not in MODULE_LISTS:
        return [name]
    return [part for child in children for part in _split_module(modules, child, max_numel)]


def _matching_modules(modules: Mapping[str, nn.Module], patterns: Sequence[str]) -> list[str]:
    missed = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in modules)]
    if missed:
        known = ", ".join(list(modules)[:9])
        raise ValueError(f"no module matches the unit pattern ({', '.join(missed)}); the model has {known}")
    chosen = [name for name in modules if any(fnmatchcase(name, pattern) for pattern in patterns)]
    lists = [name for name in chosen if type(modules[name]).__name__ in MODULE_LISTS]
    if lists:
        raise ValueError(f"a list of modules is never called, so it cannot be a unit ({lists[0]}); use {lists[0]}.*")
    return chosen
