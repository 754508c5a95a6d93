"""The first values that transformers gives a model's parameters, drawn by counters instead of a generator.

`_init_weights` of a class fills whole tensors one after another, so that a number depends on those drawn before. Here
it runs on the meta device, and each filling is recorded as a distribution: every rank then draws its slices alone
(rng.py). What a class computes in another way (ranges, logarithms) is computed once, on each rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from echelon import rng
from echelon.compat import storage_key, torch_dispatch_mode

_aten = torch.ops.aten


@dataclass(frozen=True)
class Filling:
    """A range of a parameter's elements with one distribution."""

    start: int
    stop: int
    distribution: str
    """normal, uniform or constant"""
    low: float = 0.0
    """the mean of a normal, the least of a uniform, the value of a constant"""
    high: float = 0.0
    """the standard deviation of a normal, the most of a uniform"""

    def values(self, key: int, index: Tensor, dtype: torch.dtype) -> Tensor:
        if self.distribution == "normal":
            return self.low + rng.normal(key, index, dtype) * self.high
        if self.distribution == "uniform":
            return self.low + rng.uniform(key, index, torch.float32).to(dtype) * (self.high - self.low)
        return torch.full(index.shape, self.low, dtype=dtype, device=index.device)


@dataclass(frozen=True)
class RecordedInit(rng.Init):
    """The fillings of a parameter in order; a later one covers an earlier one."""

    distribution: str = "recorded"
    fillings: tuple[Filling, ...] = ()

    def values(self, seed: int, name: str, index: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.zeros(index.shape, dtype=dtype, device=index.device)
        for filling in self.fillings:
            inside = (index >= filling.start) & (index < filling.stop)
            out = torch.where(inside, filling.values(rng.key(seed, name), index, dtype), out)
        return out


@dataclass(frozen=True)
class ComputedInit(rng.Init):
    """Values that the model's class computes."""

    distribution: str = "computed"
    tensor: Tensor = field(default_factory=lambda: torch.zeros(0))

    def values(self, seed: int, name: str, index: Tensor, dtype: torch.dtype) -> Tensor:
        return self.tensor.flatten()[index.cpu()].to(index.device, dtype)


class _FillingRecorder(torch_dispatch_mode()):  # type: ignore[misc]
    """Records what fills each parameter on the meta device."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.names = {storage_key(p): name for name, p in model.named_parameters()}
        self.fillings: dict[str, list[Filling]] = {}
        self.computed: set[str] = set()
        """parameters that are written in another way"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], Tensor) else None
        name = self.names.get(storage_key(target)) if target is not None and target.is_meta else None
        if name is not None and func._schema.is_mutable:
            self._record(name, target, func, args, kwargs)
        return func(*args, **kwargs)

    def _record(self, name: str, target: Any, func: Any, args: Any, kwargs: Any) -> None:
        given = [*args[1:], *(value for key, value in kwargs.items() if key != "generator")]
        numbers = [float(value) for value in given if isinstance(value, int | float)]
        start, stop = target.storage_offset(), target.storage_offset() + target.numel()
        match func:
            case _aten.normal_.default:
                mean, std = [*numbers, *(0.0, 1.0)[len(numbers) :]]
                filling = Filling(start, stop, "normal", mean, std)
            case _aten.uniform_.default:
                low, high = [*numbers, *(0.0, 1.0)[len(numbers) :]]
                filling = Filling(start, stop, "uniform", low, high)
            case _aten.zero_.default:
                filling = Filling(start, stop, "constant")
            case _aten.fill_.Scalar:
                filling = Filling(start, stop, "constant", numbers[0])
            case _:
                self.computed.add(name)
                return
        if not target.is_contiguous():
            self.computed.add(name)
        self.fillings.setdefault(name, []).append(filling)
        if target.numel() == target.untyped_storage().nbytes() // target.element_size():
            self.fillings[name] = self.fillings[name][-1:]
            self.computed.discard(name)


def record_init(model: Any) -> dict[str, rng.Init]:
    """Return the distribution of each parameter of a transformers model on the meta device, by name."""
    recorder = _FillingRecorder(model)
    for tensor in (*model.modules(), *model.parameters()):
        if hasattr(tensor, "_is_hf_initialized"):
            del tensor._is_hf_initialized
    with torch.no_grad(), recorder:
        for owner, module in _children_first(model, model):
            owner._init_weights(module)
    rules: dict[str, rng.Init] = {}
    for name, _ in model.named_parameters():
        if name in recorder.computed or name not in recorder.fillings:
            rules[name] = ComputedInit(tensor=_compute(model, name))
        else:
            rules[name] = RecordedInit(fillings=tuple(recorder.fillings[name]))
    return rules


def _children_first(owner: Any, module: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """Every module after its children, with the model of transformers that initialises it: the innermost around it."""
    owner = module if hasattr(module, "_init_weights") else owner
    for child in module.children():
        yield from _children_first(owner, child)
    yield owner, module


def _compute(model: Any, name: str) -> Tensor:
    """Compute a parameter's first values, with those of its module, from a generator that the name seeds."""
    path, _, attribute = name.rpartition(".")
    owner = next(owner for owner, module in _children_first(model, model) if module is model.get_submodule(path))
    module = copy.deepcopy(model.get_submodule(path)).to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(rng.key(0, name))
        for parameter in module.parameters(recurse=False):
            parameter.zero_()
        (module if owner is model.get_submodule(path) else owner)._init_weights(module)
    value: Tensor = getattr(module, attribute).detach()
    return value


def move_to_meta(model: nn.Module) -> None:
    """Move parameters to the meta device that a class drew from torch's generator, as `torch.normal` does, while it
    was built there: every process has others."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                module._parameters[name] = moved.setdefault(parameter, empty)


def materialize_buffers(model: Any) -> None:
    """Give the buffers of a model on the meta device their values: frequencies, tables of positions, biases."""
    owner: Any
    module: Any
    for owner, module in _children_first(model, model):
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name in names:
            module._buffers[name] = torch.zeros_like(module.get_buffer(name), device="cpu")
        if names:
            marked: list[Any] = [module, *module._buffers.values()]
            for tensor in marked:
                if hasattr(tensor, "_is_hf_initialized"):
                    del tensor._is_hf_initialized
            with torch.no_grad():
                owner._init_weights(module)
