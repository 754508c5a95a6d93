"""One region of a model on every tp rank at once, in the threads of one process: whether a plan is exact.

Each thread splits a copy of the module as a rank will, runs it forward and backward, and meets the others in its
collectives. Output, gradient of the input and gradients of all parameters must equal those of the whole module, so a
plan whose forward is right and whose gradients are not is refused too. In float64, with random weights.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from echelon.layout.placement import LogicalParam
from echelon.models.foreign.float64_casts import float64_casts
from echelon.models.foreign.layer_stack import HIDDEN, first_output
from echelon.parallel.tp.region_plan import RegionPlan, RegionSplitter
from echelon.parallel.tp.tp_collectives import FullSequenceBoundary

TOLERANCE = 1e-9
PATIENCE = 60.0
"""seconds that a thread waits for the others, in case one of them has failed"""


class ThreadAxis:
    """The tp axis of one thread: what `FullSequenceBoundary` needs of a mesh axis."""

    name = "tp"

    def __init__(self, index: int, slots: list[Tensor | None], barrier: threading.Barrier):
        self.index, self.size, self._slots, self._barrier = index, len(slots), slots, barrier

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        self._slots[self.index] = tensor.clone()
        self._barrier.wait(PATIENCE)
        slots = [slot for slot in self._slots if slot is not None]
        total = torch.stack(slots).sum(0)
        self._barrier.wait(PATIENCE)
        return tensor.copy_(total)


@dataclass(frozen=True)
class RegionCall:
    """What a module was called with, and what it gave."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def hidden(self) -> Tensor:
        first: Tensor = self.args[0] if self.args else self.kwargs[HIDDEN]
        return first

    def run(self, module: nn.Module) -> Tensor:
        return first_output(module(*self.args, **self.kwargs))

    def separate(self) -> tuple[RegionCall, list[Tensor]]:
        """The same call with inputs of its own, of which the result will have gradients, and these inputs."""
        inputs: list[Tensor] = []

        def renew(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return type(value)(map(renew, value))
            if isinstance(value, Tensor) and (value.requires_grad or value is self.hidden):
                inputs.append(value.detach().clone().requires_grad_())
                return inputs[-1]
            return value

        return RegionCall(renew(self.args), {key: renew(value) for key, value in self.kwargs.items()}), inputs


class RefuseEmptyHeads(TorchFunctionMode):
    """Raises on attention without heads, which a wrong split asks for: torch 2.11 divides by their number and dies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            shapes = [tuple(value.shape) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if any(0 in shape for shape in shapes):
                raise ValueError(f"attention has no heads (shapes {shapes})")
        return func(*args, **kwargs)


@dataclass(frozen=True)
class RegionResult:
    """Output and gradients of a region."""

    output: Tensor
    input_grads: tuple[Tensor, ...]
    grads: Mapping[str, Tensor]


def run_whole(module: nn.Module, call: RegionCall) -> RegionResult:
    """Run a module on one device, with the cosine of its output's elements as gradient."""
    return _run(module, call)


def _run(module: nn.Module, call: RegionCall) -> RegionResult:
    call, inputs = call.separate()
    module.zero_grad()
    with float64_casts(torch.float64), RefuseEmptyHeads():
        output = call.run(module)
        seed = torch.arange(output.numel(), dtype=output.dtype).view(output.shape).cos()
        output.backward(seed)
    grads = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in module.named_parameters()}
    input_grads = tuple(x.grad if x.grad is not None else torch.zeros_like(x) for x in inputs)
    return RegionResult(output.detach(), input_grads, grads)


def is_exact(module: nn.Module, call: RegionCall, whole: RegionResult, plan: RegionPlan, tp: int) -> bool:
    """Whether `tp` ranks that split the module by the plan compute what it computes whole."""
    plan = plan.at("")
    weights = {name: p.detach() for name, p in module.named_parameters()}
    slots: list[Tensor | None] = [None] * tp
    barrier = threading.Barrier(tp)

    def rank(index: int) -> tuple[RegionResult, dict[str, LogicalParam]]:
        try:
            local, params = _local_copy(module, weights, plan, ThreadAxis(index, slots, barrier))
            return _run(local, call), params
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(tp) as pool:
        ranks = [pool.submit(rank, index) for index in range(tp)]
        try:
            results = [one.result() for one in ranks]
        except Exception:  # whatever a module's code raises on wrong sizes
            return False
    return all(
        _agrees(whole, [result for result, _ in results], index, params) for index, (_, params) in enumerate(results)
    )


def _local_copy(
    module: nn.Module, weights: Mapping[str, Tensor], plan: RegionPlan, axis: Any
) -> tuple[nn.Module, dict[str, LogicalParam]]:
    """One rank's part of a module."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in module.parameters()
    }  # not one full copy per rank
    local = copy.deepcopy(module, memo)
    given = [LogicalParam(name=name, names=(name,), shape=tuple(w.shape)) for name, w in weights.items()]
    splitter = RegionSplitter(local, given, FullSequenceBoundary(axis))
    splitter.split(plan)
    params = {param.name: param for param in splitter.split_params()}
    for name, param in params.items():
        owner, _, attribute = name.rpartition(".")
        box = tuple(slice(low, high) for low, high in param.box({"tp": axis.index}))
        values = weights[name][box].clone()
        if tuple(values.shape) != param.local_shape:
            raise ValueError("the sizes do not divide")
        local.get_submodule(owner)._parameters[attribute] = nn.Parameter(values)
    return local, params


def _agrees(whole: RegionResult, results: list[RegionResult], index: int, params: Mapping[str, LogicalParam]) -> bool:
    result = results[index]
    grads = zip(result.input_grads, whole.input_grads, strict=True)
    if not _close(result.output, whole.output) or not all(_close(grad, expected) for grad, expected in grads):
        return False
    for name, param in params.items():
        box = tuple(slice(low, high) for low, high in param.box({"tp": index}))
        grad = result.grads[name]
        if param.partial_grad_axes:
            copies = param.splits[0].num_copies if param.splits else len(results)
            first = index // copies * copies
            grad = torch.stack([other.grads[name] for other in results[first : first + copies]]).sum(0)
        if not _close(grad, whole.grads[name][box]):
            return False
    return True


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= TOLERANCE * max(1.0, float(b.abs().max())))


Trial = Callable[[RegionPlan], bool]
