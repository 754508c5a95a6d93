"""Layers that run the same operators, so that tracing runs one of them.

Two layers are equal if their modules, the shapes of their parameters and what the model calls them with are, but for
the layer's number. Values of floats matter as far as code may test them, 0 or 1: no shape depends on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from echelon.compat import storage_key

if TYPE_CHECKING:
    from torch import nn

    from echelon.models.foreign.layer_stack import LayerStack

Feature = tuple[str, ...]
"""where a value is: in a module of the layer, in a call of it, in the configuration"""
OTHER_FLOAT = "a float"
MIN_PROGRESSION = 3
"""layers whose numbers, other than consecutive ones, are no accident"""


def find_repeats(model: nn.Module, shared: Any) -> dict[str, str]:
    """Return the first of the layers that equal it, by the layer's name, for all but the first ones.

    Only layers of transformers (models/foreign) show what they are called with: the shared values of its pipeline.
    """
    stack: LayerStack | None = getattr(model, "layer_stack", None)
    if stack is None:
        return {}
    names, calls = stack.layer_names, shared
    uses = Counter(key for call in calls for key in {storage_key(tensor) for tensor in _tensors(vars(call))})
    features = [
        {
            **dict(_module_features(model.get_submodule(name))),
            **dict(_call_features(("call",), vars(call), uses)),
            **dict(_config_features(model, index, len(names))),
        }
        for index, (name, call) in enumerate(zip(names, calls, strict=True))
    ]
    numbers = _layer_numbers(features)
    first: dict[Any, str] = {}
    repeats: dict[str, str] = {}
    for name, of_layer in zip(names, features, strict=True):
        known = first.setdefault(frozenset(item for item in of_layer.items() if item[0] not in numbers), name)
        if known != name:
            repeats[name] = known
    return repeats


def renamed_weights(model: nn.Module, layer: str, first: str) -> dict[str, str]:
    """Return the names of an equal layer's parameters, by those of the first; a shared parameter has its first name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def named(path: str) -> Iterator[str]:
        parameters = model.get_submodule(path).named_parameters(remove_duplicate=False)
        return (names[id(parameter)] for _, parameter in parameters)

    return dict(zip(named(first), named(layer), strict=True))


def _module_features(layer: nn.Module) -> Iterator[tuple[Feature, Any]]:
    for path, module in layer.named_modules():
        # Adapted layers have classes of their own under the names of those that they derive from.
        yield ("module", path), (type(module).__module__, type(module).__qualname__)
        for key, value in vars(module).items():
            if not key.startswith("_") and (plain := _plain(value)) is not NotImplemented:
                yield ("module", path, key), plain
    for path, tensor in (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False)):
        yield ("tensor", path), (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _call_features(path: Feature, value: Any, uses: Mapping[int, int]) -> Iterator[tuple[Feature, Any]]:
    """What matters of arguments. A tensor that several layers are given counts as itself."""
    if hasattr(value, "untyped_storage"):
        key = storage_key(value)
        yield path, (tuple(value.shape), value.dtype, key if uses[key] > 1 else None)
    elif isinstance(value, list | tuple | Mapping):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        yield path, len(value)
        for key, item in items:
            yield from _call_features((*path, str(key)), item, uses)
    else:
        plain = _plain(value)
        yield path, type(value) if plain is NotImplemented else plain


def _config_features(model: Any, index: int, num_layers: int) -> Iterator[tuple[Feature, Any]]:
    """What a list of the configuration says of one layer: its forward may read it by the layer's number."""
    for key, value in vars(model.config).items():
        if isinstance(value, list | tuple) and len(value) == num_layers:
            yield ("config", key), _plain(value[index])


def _plain(value: Any) -> Any:
    """A value that can be compared, NotImplemented for others."""
    if isinstance(value, float):
        return value if value in (0.0, 1.0) else OTHER_FLOAT
    if isinstance(value, int | str | None):
        return value
    if isinstance(value, list | tuple) and all(isinstance(item, int | str | None) for item in value):
        return tuple(value)
    return NotImplemented


def _layer_numbers(features: Sequence[Mapping[Feature, Any]]) -> set[Feature]:
    """The features that number the layers which have them: consecutively, or in equal steps."""
    values: dict[Feature, list[tuple[int, Any]]] = {}
    for index, of_layer in enumerate(features):
        for key, value in of_layer.items():
            values.setdefault(key, []).append((index, value))
    return {key for key, pairs in values.items() if _is_numbering(pairs)}


def _is_numbering(pairs: Sequence[tuple[int, Any]]) -> bool:
    if any(not isinstance(value, int) or isinstance(value, bool) for _, value in pairs):
        return False
    (start, first), (after, second) = pairs[0], pairs[min(1, len(pairs) - 1)]
    step = (second - first) / (after - start) if after > start else 1
    if not step or (step != 1 and len(pairs) < MIN_PROGRESSION):
        return False
    return all(value == first + step * (index - start) for index, value in pairs)


def _tensors(value: Any) -> Iterator[Any]:
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
