"""Activation checkpointing of modules: forward saves their input, and backward reruns them for what autograd needs.

[Note: a segment]

    layers 0, 1, 2 of a segment        forward                   backward
    input --> 0 --> 1 --> 2 --> out    saves the input of 0      the first unpack (layer 2's) reruns 0, 1, 2 and holds
                                       and nothing else          all that they saved; each unpack frees its tensor

Saved tensors inside a layer are dropped and numbered; a rerun saves the same ones in the same order. The last layer of
a rerun stops as soon as all its saved tensors are recomputed: a collective at its end is not repeated. The model calls
layers one by one and knows nothing of this: a mark on the tensor shows that layer 1 reads an output of layer 0, which
is then not saved. Other arguments of a layer (masks, RoPE angles) are held as they are. A segment of one layer is plain
checkpointing.

Inputs are saved by an autograd function, so that saved-tensor hooks around the model see them. Modules are wrapped
inside: hooks on them (unsharding parameters, entering regions) run once. Where backward has two halves that both
unpack, there are two reruns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from echelon.memory.checkpointing.saved_inputs import SaveInput, save_as_is
from echelon.rng import RandomStream

ShapeAndDtype = tuple[torch.Size, torch.dtype]


class RngSnapshot:
    """The states of torch's generators, to restore them: a layer that draws from them draws the same again.

    Our modules draw nothing from them (rng.py), but a custom layer may (`F.dropout`, `torch.rand`). A state is a few
    bytes on the host, also a GPU generator's, so taking it does not synchronise with the device.
    """

    def __init__(self) -> None:
        self._cpu_state = torch.get_rng_state()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._cuda_state = None if self._device is None else torch.cuda.get_rng_state(self._device)

    def restore(self) -> None:
        torch.set_rng_state(self._cpu_state)
        if self._device is not None and self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._device)


class CheckpointSegment:
    """Modules that are recomputed together, in the order in which they are called."""

    def __init__(self, stream: RandomStream, save_input: SaveInput = save_as_is):
        self.stream, self.save_input = stream, save_input
        self.layers: list[CheckpointedLayer] = []
        self.before_recompute: Callable[[nn.Module], None] = lambda _module: None
        """called before a module is recomputed, to unshard its parameters"""
        self._last_call: _LayerCall | None = None
        """the previous call, if the next layer's belongs to the same pass"""

    def add(self, name: str, module: nn.Module) -> None:
        self.layers.append(CheckpointedLayer(self, len(self.layers), name, module))

    def previous_call(self, layer: CheckpointedLayer, arguments: Any) -> _LayerCall | None:
        """Return the previous layer's call in the same pass; None where a pass starts."""
        last = self._last_call
        if last is None or last.layer.index != layer.index - 1:
            return None  # also where layers were skipped: the segment then starts here
        if not any(last.output_index(tensor) is not None for tensor in iter_tensors(arguments)):
            raise ValueError(
                f"{layer.name} reads no output of {last.layer.name}: the model computes something between them, which "
                "cannot be recomputed; move it into a layer, or use recompute=full"
            )
        return last

    def finish_call(self, frame: _LayerCall) -> None:
        self._last_call = frame if frame.layer.index < len(self.layers) - 1 else None


class CheckpointedLayer:
    """One module of a segment; replaces the module's forward."""

    def __init__(self, segment: CheckpointSegment, index: int, name: str, module: nn.Module):
        self.segment, self.index, self.name, self.module = segment, index, name, module
        self.forward: Callable[..., Any] = module.forward
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        arguments = (args, kwargs)
        frame = _LayerCall(self, self.segment.previous_call(self, arguments), arguments)
        with saved_tensors_hooks(frame.pack, frame.unpack):
            out = self.forward(*args, **kwargs)
        frame.mark_outputs(out)
        self.segment.finish_call(frame)
        return out


class _LayerCall:
    """One call of a layer: its arguments, and what a rerun recomputed.

    It holds the previous call and not the other way round: a cycle would keep inputs until the garbage collector runs.
    """

    def __init__(self, layer: CheckpointedLayer, before: _LayerCall | None, arguments: Any):
        self.layer, self.previous = layer, before
        self.token = object()
        self.saved_forms: list[ShapeAndDtype] = []
        """of the tensors that autograd saved"""
        self.recomputed: dict[int, Tensor] = {}
        """recomputed saved tensors that backward has not unpacked yet, by index"""
        saved: list[Tensor] = []
        self._restore_input: list[tuple[Callable[[Tensor], Tensor], bool]] = []
        self._arguments = map_tensors(arguments, lambda tensor: self._save_argument(tensor, saved))
        anchor = torch.empty(0, requires_grad=True)
        # Hold the tensor, not its grad_fn: before torch 2.12 that frees its saved tensors together with the tensor.
        self._saved: Any = _SaveInputs.apply(anchor, *saved) if saved else None
        self._samples = layer.segment.stream.samples
        self._rng = RngSnapshot()
        self._autocast = _autocast_settings()
        self._num_recomputed = 0

    # -- forward ------------------------------------------------------------------------------------------------------

    def _save_argument(self, tensor: Tensor, saved: list[Tensor]) -> Any:
        """Return the slot that replaces a tensor among the arguments."""
        number = self.previous.output_index(tensor) if self.previous is not None else None
        if number is not None:
            return _OutputSlot(number, tensor.requires_grad)
        keep = self.layer.segment.save_input if tensor.requires_grad and tensor.is_floating_point() else save_as_is
        stored, restore = keep(tensor.detach())
        saved.append(stored)
        self._restore_input.append((restore, tensor.requires_grad))
        return _InputSlot(len(self._restore_input) - 1)

    def mark_outputs(self, out: Any) -> None:
        """Mark the outputs, so that the next layer's call recognises them."""
        for number, tensor in enumerate(iter_tensors(out)):
            marked: Any = tensor
            marked.checkpoint_output = (self.token, number, tensor._version)

    def output_index(self, tensor: Tensor) -> int | None:
        """Return which of this layer's outputs a tensor is, or None."""
        token, number, version = getattr(tensor, "checkpoint_output", (None, 0, 0))
        if token is not self.token:
            return None
        if tensor._version != version:
            raise ValueError(
                f"an output of {self.layer.name} was modified in place before the next layer and cannot be recomputed; "
                "use recompute=full, or an out-of-place operator"
            )
        return int(number)

    def pack(self, tensor: Tensor) -> int:
        self.saved_forms.append((tensor.shape, tensor.dtype))
        return len(self.saved_forms) - 1

    # -- backward -----------------------------------------------------------------------------------------------------

    def unpack(self, number: int) -> Tensor:
        if number not in self.recomputed:
            self._recompute_pass()
        return self.recomputed.pop(number)

    def _recompute_pass(self) -> None:
        """Rerun this call and those before it in its pass."""
        calls: list[_LayerCall] = [self]
        while calls[-1].previous is not None:
            calls.append(calls[-1].previous)
        outputs: list[Tensor] = []
        for call in reversed(calls):
            outputs = call.recompute(outputs, stop_early=call is self)

    def recompute(self, previous_outputs: Sequence[Tensor], *, stop_early: bool) -> list[Tensor]:
        """Rerun the layer on the previous layer's outputs; with `stop_early`, until all saved tensors are there."""
        layer, self._num_recomputed, self.recomputed = self.layer, 0, {}
        stored = self._saved.grad_fn.saved_tensors if self._saved is not None else ()

        def restore(value: Any) -> Any:
            if isinstance(value, _OutputSlot):
                return previous_outputs[value.index].detach().requires_grad_(value.differentiable)
            restore_input, differentiable = self._restore_input[value.index]
            return restore_input(stored[value.index]).detach().requires_grad_(differentiable)

        args, kwargs = map_tensors(self._arguments, restore, (_InputSlot, _OutputSlot))
        layer.segment.before_recompute(layer.module)

        def record(tensor: Tensor) -> None:
            self._record(tensor)
            if stop_early and self._num_recomputed == len(self.saved_forms):
                raise _RecomputeDoneError

        with ExitStack() as stack:
            stack.enter_context(recompute_context(layer.module, layer.segment.stream, self._samples, self._rng))
            for settings in self._autocast:
                stack.enter_context(torch.autocast(**settings))
            stack.enter_context(torch.enable_grad())
            try:
                with saved_tensors_hooks(record, _no_backward):
                    out = layer.forward(*args, **kwargs)
            except _RecomputeDoneError:
                return []
        if self._num_recomputed != len(self.saved_forms):
            self._raise_mismatch(f"{len(self.saved_forms)} tensors at first, then {self._num_recomputed}")
        return list(iter_tensors(out))

    def _record(self, tensor: Tensor) -> None:
        number, self._num_recomputed = self._num_recomputed, self._num_recomputed + 1
        if number >= len(self.saved_forms):
            self._raise_mismatch(f"{len(self.saved_forms)} tensors at first, then more")
        if self.saved_forms[number] != (tensor.shape, tensor.dtype):
            self._raise_mismatch(f"{self.saved_forms[number]} at first, then {(tensor.shape, tensor.dtype)}")
        self.recomputed[number] = tensor.detach()

    def _raise_mismatch(self, difference: str) -> None:
        raise ValueError(
            f"{self.layer.name} saved different tensors when it was recomputed ({difference}); a layer must "
            "depend only on its arguments (no generator or counter of its own), or use recompute=none"
        )


@dataclass
class _InputSlot:
    """A saved input among the arguments."""

    index: int


@dataclass
class _OutputSlot:
    """An output of the previous layer among the arguments."""

    index: int
    differentiable: bool


class _RecomputeDoneError(Exception):
    """All saved tensors are recomputed."""


def _no_backward(_nothing: Any) -> Tensor:
    raise AssertionError("backward never runs through a rerun")


class _SaveInputs(Function):
    """Saves tensors where autograd and saved-tensor hooks see them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("no gradient reaches this function")


def iter_tensors(value: Any, *, in_dataclasses: bool = False) -> Iterator[Tensor]:
    """Yield the tensors in a tensor, tuple, list or dict, recursively; or also in the attributes of dataclasses."""
    if isinstance(value, Tensor):
        yield value
    if in_dataclasses and is_dataclass(value) and not isinstance(value, type):
        value = vars(value) if hasattr(value, "__dict__") else {f.name: getattr(value, f.name) for f in fields(value)}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    for item in items:
        yield from iter_tensors(item, in_dataclasses=in_dataclasses)


def map_tensors(value: Any, change: Callable[[Any], Any], types: type | tuple[type, ...] = Tensor) -> Any:
    """Return value with `change` applied to each tensor, or to each instance of `types`."""
    if isinstance(value, types):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change, types) for item in value))
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, change, types) for item in value)
    if type(value) is dict:
        return {key: map_tensors(item, change, types) for key, item in value.items()}
    return value


def _autocast_settings() -> list[dict[str, Any]]:
    """Return the active autocast settings: backward may run outside of them."""
    caches = torch.is_autocast_cache_enabled()
    return [
        {"device_type": device, "dtype": torch.get_autocast_dtype(device), "cache_enabled": caches}
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]


@contextmanager
def recompute_context(
    module: nn.Module, stream: RandomStream, samples: Tensor | None, rng: RngSnapshot | None = None
) -> Iterator[None]:
    """Rerun a forward inside this context: with the same dropout masks, and without updating statistics again.

    `rng` holds torch's generator states of the first forward; the current ones are restored afterwards.
    """
    current_samples, stream.samples = stream.samples, samples
    current_rng = RngSnapshot()
    if rng is not None:
        rng.restore()
    parts: list[Any] = list(module.modules())
    batch_norms = [part for part in parts if isinstance(getattr(part, "num_batches_tracked", None), Tensor)]
    statistics = [(part, part.momentum, part.num_batches_tracked.clone()) for part in batch_norms]
    for part in batch_norms:
        part.momentum = 0.0
    moe_layers = [part for part in parts if hasattr(part, "counts_load")]
    for part in moe_layers:
        part.counts_load = False
    try:
        yield
    finally:
        current_rng.restore()
        stream.samples = current_samples
        for part in moe_layers:
            part.counts_load = True
        for part, momentum, count in statistics:
            part.momentum = momentum
            part.num_batches_tracked.copy_(count)
