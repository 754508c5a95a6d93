"""A model as a chain of links, so that a pipeline can cut it between any two of them.

A model that can be cut has a method `chain()`. On one device running the links one after another is its forward:

    carried = None
    shared = chain.shared(**inputs)
    for link in chain.links:
        carried = link.run(carried, shared, **inputs)

What one link returns is what the next is given, a tensor or a tuple of tensors. The last returns the loss contract's
pair. Every stage is given the batch, so what a link reads of it (targets, document numbers) does not travel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def _no_shared(**_: Any) -> None:
    return None


@dataclass(frozen=True)
class PipelineLayer:
    name: str
    """for people; no two links have the same"""
    modules: tuple[str, ...]
    """the modules and parameters that it uses, by their names in the model"""
    run: Callable[..., Any]
    """(what the link before returned, what is shared, **inputs) to what the next link is given"""


@dataclass(frozen=True)
class PipelineModel:
    layers: tuple[PipelineLayer, ...]
    shared: Callable[..., Any] = _no_shared
    """from the inputs to what several links need, computed once on every stage: masks, angles"""
    slice_shared: Callable[[Any, int, int], Any] | None = None
    """what is shared, for positions start .. stop - 1 of every sequence alone (TeraPipe)"""
    logits: Callable[..., Any] | None = None
    """what the last link runs instead where text is written: (carried, shared, **inputs) to logits"""


def get_pipeline_model(model: nn.Module) -> PipelineModel:
    """The model's chain, or a clear refusal."""
    make = getattr(model, "chain", None)
    if make is None:
        raise ValueError(
            f"a pipeline needs to know where {type(model).__name__} can be cut; give the class a method `chain()` "
            "that returns echelon.Chain(links=(echelon.Link(name, modules, run), ...)), or use pp=1"
        )
    chain: PipelineModel = make()
    _check(model, chain)
    return chain


def _check(model: nn.Module, chain: PipelineModel) -> None:
    """Links have names of their own, every parameter is used by one, and every name that they give is there."""
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    names |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unknown = [f"{name} ({link.name})" for link in chain.layers for name in link.modules if name not in names]
    used = [name for link in chain.layers for name in link.modules]
    lost = [
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if not any(is_within(name, other) for other in used)
    ]
    twice = [name for name, count in Counter(link.name for link in chain.layers).items() if count > 1]
    problems = [f"no such module: {', '.join(unknown)}"] if unknown else []
    problems += [f"several links are called {', '.join(twice)}"] if twice else []
    problems += [f"no link uses {', '.join(lost[:5])}"] if lost else []
    if problems:
        raise ValueError(f"the chain does not fit {type(model).__name__}: {'; '.join(problems)}")


def is_within(name: str, module: str) -> bool:
    """The name is that of a module or one of its parts."""
    return name == module or name.startswith(module + ".")
