"""A model as a sequence of pipeline layers: a pipeline can cut it into stages between any two of them.

A model for pipelines has a method `pipeline_model()` that returns its `PipelineModel`. On one device its forward is:

    hidden = None
    shared = pipeline_model.shared(**inputs)
    for layer in pipeline_model.layers:
        hidden = layer.run(hidden, shared, **inputs)

A layer returns the input of the next one, a tensor or a tuple of tensors; the last returns the loss contract's pair.
Every stage reads the batch itself, so that p2p transfers carry no targets and no document indices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def _no_shared(**_: Any) -> None:
    return None


@dataclass(frozen=True)
class PipelineLayer:
    """The smallest part of a model that a pipeline stage can hold.

    >>> layer = ec.PipelineLayer("embed", ("embed",), lambda hidden, shared, tokens: tokens)
    >>> layer.modules
    ('embed',)
    """

    name: str
    """unique"""
    modules: tuple[str, ...]
    """names of the modules and parameters that it uses"""
    run: Callable[..., Any]
    """(output of the previous layer, shared, **inputs) to the output"""


@dataclass(frozen=True)
class PipelineModel:
    """The pipeline layers of a model, in order.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    >>> pipeline_model = ec.PipelineModel(
    ...     layers=(
    ...         ec.PipelineLayer("first", ("0",), lambda hidden, shared, x: model[0](x)),
    ...         ec.PipelineLayer("last", ("1",), lambda hidden, shared, x: model[1](hidden)),
    ...     )
    ... )
    >>> [layer.name for layer in pipeline_model.layers]
    ['first', 'last']
    """

    layers: tuple[PipelineLayer, ...]
    shared: Callable[..., Any] = _no_shared
    """from the inputs to what several layers read, computed once on every stage: masks, RoPE angles"""
    slice_shared: Callable[[Any, int, int], Any] | None = None
    """the shared values of tokens start .. stop - 1 of every sequence (TeraPipe)"""
    logits: Callable[..., Any] | None = None
    """replaces the last layer in generation: (hidden, shared, **inputs) to logits"""


def block_layers(blocks: nn.ModuleList, run: Callable[..., Any]) -> tuple[PipelineLayer, ...]:
    """A layer for each of `blocks`, which runs as `run(block, hidden, shared, **inputs)`."""

    def run_block(index: int, *given: Any, **inputs: Any) -> Any:
        return run(blocks[index], *given, **inputs)  # by index: parallelism may replace a block

    return tuple(PipelineLayer(f"blocks.{i}", (f"blocks.{i}",), partial(run_block, i)) for i in range(len(blocks)))


def has_pipeline_model(model: nn.Module) -> bool:
    """Whether a model's layers can run one by one. Those of some classes of transformers cannot."""
    return hasattr(model, "pipeline_model") and not getattr(model, "layer_problem", "")


def get_pipeline_model(model: nn.Module) -> PipelineModel:
    """The pipeline model that the module's `pipeline_model()` returns, after checking it."""
    make = getattr(model, "pipeline_model", None)
    if make is None and callable(getattr(model, "chain", None)):
        raise ValueError(f"{type(model).__name__} has a method `chain()`, which is now `pipeline_model()`; rename it")
    if make is None:
        raise ValueError(
            f"pp > 1 requires inputs of the forward of {type(model).__name__}, from which its stages are derived, or a "
            "method `pipeline_model()` that returns echelon.PipelineModel(layers=(echelon.PipelineLayer(name, modules, "
            "run), ...)); give `inputs`, add the method, or use pp=1"
        )
    pipeline_model: PipelineModel = make()
    _check(model, pipeline_model.layers)
    return pipeline_model


def _check(model: nn.Module, layers: Sequence[PipelineLayer]) -> None:
    """Require unique names, known modules, and a layer for every parameter."""
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names = {*parameters, *(name for name, _ in model.named_modules(remove_duplicate=False))}
    unknown = [f"{name} ({layer.name})" for layer in layers for name in layer.modules if name not in names]
    used = [name for layer in layers for name in layer.modules]
    unused = [name for name in parameters if not any(is_within(name, module) for module in used)]
    duplicates = [name for name, count in Counter(layer.name for layer in layers).items() if count > 1]
    problems = [f"unknown modules: {', '.join(unknown)}"] if unknown else []
    problems += [f"several layers are named {', '.join(duplicates)}"] if duplicates else []
    problems += [f"no layer uses {', '.join(unused[:5])}"] if unused else []
    if problems:
        raise ValueError(f"invalid pipeline_model() of {type(model).__name__}: {'; '.join(problems)}; correct it")


def is_within(name: str, module: str) -> bool:
    """Whether a parameter or module is the module itself or inside it."""
    return name == module or name.startswith(module + ".")
