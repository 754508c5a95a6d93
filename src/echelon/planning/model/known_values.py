"""Values of tensors that do not depend on weights, kept while a model runs without values.

A model may branch on what it computes from its inputs and from sizes: whether positions start anew inside a row,
whether a mask hides anything, how long the longest row is. Such tensors are small. Their operators run a second time
with values, so that `bool(tensor)`, `tensor.item()` and shapes that depend on them are what they are in a real run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from echelon.compat import map_nested, storage_key, without_dispatch_modes

MAX_NUMEL = 1 << 20
"""elements of a tensor whose values are kept"""


class UnknownValueError(RuntimeError):
    """A model reads a value that depends on weights or random numbers."""


class KnownValues:
    """The values of small tensors that are computed from inputs and constants alone."""

    def __init__(self) -> None:
        self._values: Any = WeakIdKeyDictionary()
        self._lost: dict[int, torch.UntypedStorage] = {}
        """values that an operator has overwritten with unknown ones; a freed storage could reuse its key"""

    def set(self, tensor: Tensor, value: Tensor) -> None:
        """Keep the value of an input or a buffer, if it is small."""
        if not value.is_meta and value.numel() <= MAX_NUMEL:
            with without_dispatch_modes():
                self._keep(tensor, value.detach().cpu().clone())

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator without values, and with values if those of its arguments are known."""
        given = [*iter_tensors(args), *iter_tensors(kwargs.values())]
        is_known = all(self._value(tensor) is not None for tensor in given)
        if func.overloadpacket is torch.ops.aten.index:
            args = (args[0], self._without_masks(args[1]))
        elif torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            if not is_known:
                raise UnknownValueError(f"{_name(func)} reads a value that depends on weights or random numbers")
            return self._as_unvalued(given, self._run_with_values(func, args, kwargs))
        out = func(*args, **kwargs)
        if is_known and torch.Tag.nondeterministic_seeded not in func.tags:
            made = list(iter_tensors((out,)))
            if all(_has_values(tensor) for tensor in made):
                return out
            if all(tensor.numel() <= MAX_NUMEL for tensor in made):
                computed = iter_tensors((self._run_with_values(func, args, kwargs),))
                for tensor, value in zip(made, computed, strict=True):
                    self._keep(tensor, value)
                return out
        if func._schema.is_mutable:
            self._forget(iter_tensors((out,)))
        return out

    def _without_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replace boolean masks by the indices of what they keep, whose number depends on values."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            mask = self._value(index)
            if mask is None:
                raise UnknownValueError("an index by a mask reads a value that depends on weights or random numbers")
            with without_dispatch_modes():
                kept = mask.nonzero(as_tuple=True)
            found += self._as_unvalued([index], kept)
        return found

    def _run_with_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        def with_value(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._value(leaf)
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        given = map_nested(with_value, (args, kwargs))
        with without_dispatch_modes(), torch.no_grad():
            return func(*given[0], **given[1])

    def _as_unvalued(self, given: list[Tensor], out: Any) -> Any:
        """Return new tensors like those of `out`, without values; numbers as they are."""

        def convert(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            like = given[0].new_empty(leaf.shape, dtype=leaf.dtype)
            self._keep(like, leaf)
            return like

        return map_nested(convert, out)

    def _value(self, tensor: Tensor) -> Tensor | None:
        value: Tensor | None = self._values.get(tensor)
        if value is None and _has_values(tensor):
            return tensor
        return None if value is not None and storage_key(value) in self._lost else value

    def _keep(self, tensor: Tensor, value: Tensor) -> None:
        if self._values.get(tensor) is not value:
            self._values[tensor] = value

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        values = (self._values.get(tensor) for tensor in tensors)
        self._lost.update((storage_key(value), value.untyped_storage()) for value in values if value is not None)


def _has_values(tensor: Tensor) -> bool:
    """Whether it is a tensor of a CPU, which a model makes itself."""
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def iter_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from iter_tensors(value)
        elif isinstance(value, dict):
            yield from iter_tensors(value.values())


def _name(func: Any) -> str:
    names = {"_local_scalar_dense": "item()", "equal": "torch.equal()", "nonzero": "nonzero()"}
    name = str(func.overloadpacket.__name__)
    return names.get(name, f"{name}()")
