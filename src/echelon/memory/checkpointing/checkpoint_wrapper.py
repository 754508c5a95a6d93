"""Modules that keep their input, and are run again when backward asks for what they made on the way.

[Note: a segment]

    layers 0, 1, 2 of a segment        forward                   backward
    input --> 0 --> 1 --> 2 --> out    keeps the input of 0      the first question (layer 2's) runs 0, 1, 2 again and
                                       and nothing else          holds all that they made; each answer is let go of

What autograd saves inside a layer is dropped and numbered; a repetition makes the same in the same order. The last
layer that is repeated is left as soon as everything is found: a collective at its end is not repeated. Layers are
called as ever, one by one, by a model that knows nothing of this: that layer 1 reads what layer 0 made is seen by the
tensor, which is then not kept. What else a layer is given (masks, angles) is held as it is. A segment of one layer is
plain checkpointing.

Inputs are saved by an autograd function, so that saved-tensor hooks around the model see them. Modules are wrapped
inside: hooks on them (gathering parameters, entering regions) run once. Where backward has two halves that both ask,
there are two repetitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from echelon.memory.checkpointing.rng_snapshot import RngSnapshot
from echelon.memory.checkpointing.saved_inputs import SaveInput, save_as_is
from echelon.rng import RandomStream

ShapeAndDtype = tuple[torch.Size, torch.dtype]


def _no_hook(_module: nn.Module) -> None:
    """Nobody asked to be told."""


class CheckpointSegment:
    """Modules that are repeated together, in the order in which they are called."""

    def __init__(self, stream: RandomStream, save_input: SaveInput = save_as_is):
        self.stream, self.save_input = stream, save_input
        self.layers: list[CheckpointedLayer] = []
        self.before_recompute: Callable[[nn.Module], None] = _no_hook
        """called before a module is repeated: its parameters must be there"""
        self._last_call: _LayerCall | None = None
        """the call before, where the next layer's belongs to the same pass"""

    def add(self, name: str, module: nn.Module) -> None:
        self.layers.append(CheckpointedLayer(self, len(self.layers), name, module))

    def previous_call(self, layer: CheckpointedLayer, given: Any) -> _LayerCall | None:
        """The call of the layer before, in the same pass; none where a pass begins."""
        last = self._last_call
        if last is None or last.layer.index != layer.index - 1:
            return None  # also where layers were left out: the segment then begins here
        if not any(last.output_index(tensor) is not None for tensor in iter_tensors(given)):
            raise ValueError(
                f"{layer.name} reads nothing that {last.layer.name} made: something is computed between them, which "
                "nobody could repeat; put it into a layer, or use recompute=full"
            )
        return last

    def finish_call(self, frame: _LayerCall) -> None:
        self._last_call = frame if frame.layer.index < len(self.layers) - 1 else None


class CheckpointedLayer:
    """One module of a segment; it takes the place of the module's forward."""

    def __init__(self, segment: CheckpointSegment, index: int, name: str, module: nn.Module):
        self.segment, self.index, self.name, self.module = segment, index, name, module
        self.forward: Callable[..., Any] = module.forward
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        given = (args, kwargs)
        frame = _LayerCall(self, self.segment.previous_call(self, given), given)
        with saved_tensors_hooks(frame.pack, frame.unpack):
            out = self.forward(*args, **kwargs)
        frame.mark_outputs(out)
        self.segment.finish_call(frame)
        return out

    def unwrap(self) -> None:
        """The module is as it was."""
        self.module.forward = self.forward


class _LayerCall:
    """One call of a layer: how to call it again, and what came of it.

    It holds the call before it and not the other way round: a cycle would keep inputs until the collector comes by.
    """

    def __init__(self, layer: CheckpointedLayer, before: _LayerCall | None, given: Any):
        self.layer, self.previous = layer, before
        self.token = object()
        self.saved_forms: list[ShapeAndDtype] = []
        """of what autograd saved"""
        self.recomputed: dict[int, Tensor] = {}
        """of it, what a repetition has made and nobody has asked for yet"""
        kept: list[Tensor] = []
        self._restore_input: list[tuple[Callable[[Tensor], Tensor], bool]] = []
        self._given = map_tensors(given, lambda tensor: self._save_argument(tensor, kept))
        anchor = torch.empty(0, requires_grad=True)
        # Held is the tensor, not its grad_fn: before torch 2.12 that lets go of what it saved when the tensor goes.
        self._saved: Any = _SaveInputs.apply(anchor, *kept) if kept else None
        self._samples = layer.segment.stream.samples
        self._rng = RngSnapshot()
        self._autocast = _autocast_settings()
        self._num_recomputed = 0

    # -- forward ------------------------------------------------------------------------------------------------------

    def _save_argument(self, tensor: Tensor, kept: list[Tensor]) -> Any:
        """What stands for a tensor among the arguments."""
        number = self.previous.output_index(tensor) if self.previous is not None else None
        if number is not None:
            return _OutputSlot(number, tensor.requires_grad)
        keep = self.layer.segment.save_input if tensor.requires_grad and tensor.is_floating_point() else save_as_is
        stored, back = keep(tensor.detach())
        kept.append(stored)
        self._restore_input.append((back, tensor.requires_grad))
        return _InputSlot(len(self._restore_input) - 1)

    def mark_outputs(self, out: Any) -> None:
        """So that the next layer knows what it reads."""
        for number, tensor in enumerate(iter_tensors(out)):
            marked: Any = tensor
            marked.made = (self.token, number, tensor._version)

    def output_index(self, tensor: Tensor) -> int | None:
        """Which of this layer's outputs a tensor is."""
        token, number, version = getattr(tensor, "made", (None, 0, 0))
        if token is not self.token:
            return None
        if tensor._version != version:
            raise ValueError(
                f"what {self.layer.name} made was changed in place before the next layer, which nobody could repeat; "
                "use recompute=full, or an operator that makes a new tensor"
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
        """This call and those before it in its pass."""
        calls: list[_LayerCall] = [self]
        while calls[-1].previous is not None:
            calls.append(calls[-1].previous)
        made: list[Tensor] = []
        for call in reversed(calls):
            made = call.recompute(made, stop_early=call is self)

    def recompute(self, previous_outputs: Sequence[Tensor], *, stop_early: bool) -> list[Tensor]:
        """Runs the layer again, on what the one before it `made`; until everything is found if it `stops`."""
        layer, self._num_recomputed, self.recomputed = self.layer, 0, {}
        stored = self._saved.grad_fn.saved_tensors if self._saved is not None else ()

        def put_back(value: Any) -> Any:
            if isinstance(value, _OutputSlot):
                return previous_outputs[value.index].detach().requires_grad_(value.differentiable)
            back, differentiable = self._restore_input[value.index]
            return back(stored[value.index]).detach().requires_grad_(differentiable)

        args, kwargs = map_tensors(self._given, put_back, (_InputSlot, _OutputSlot))
        layer.segment.before_recompute(layer.module)

        def note(tensor: Tensor) -> None:
            self._record(tensor)
            if stop_early and self._num_recomputed == len(self.saved_forms):
                raise _RecomputeDoneError

        with ExitStack() as inside:
            inside.enter_context(recompute_context(layer.module, layer.segment.stream, self._samples, self._rng))
            for cast in self._autocast:
                inside.enter_context(torch.autocast(**cast))
            inside.enter_context(torch.enable_grad())
            try:
                with saved_tensors_hooks(note, _no_backward):
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

    def _raise_mismatch(self, how: str) -> None:
        raise ValueError(
            f"{self.layer.name} did something else when it was repeated ({how}); a layer must depend on nothing but "
            "what it is given (no generator of its own, no counter), or use recompute=none"
        )


class _InputSlot:
    def __init__(self, number: int):
        self.index = number


class _OutputSlot:
    def __init__(self, number: int, differentiable: bool):
        self.index, self.differentiable = number, differentiable


class _RecomputeDoneError(Exception):
    """Everything that was asked for is there."""


def _no_backward(_nothing: Any) -> Tensor:
    raise AssertionError("nobody goes backward through a repetition")


class _SaveInputs(Function):
    """Nothing but a place where autograd, and hooks on it, keep tensors."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("no gradient comes here")


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Of a tensor, or of a tuple, a list or a dictionary of such."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from iter_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from iter_tensors(item)


def map_tensors(value: Any, change: Callable[[Any], Any], types: type | tuple[type, ...] = Tensor) -> Any:
    """The same with each tensor, or each of some other kinds, changed."""
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
    """How autocast is set, to be set so again: backward may run outside of it."""
    found = []
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            found.append(
                {
                    "device_type": device,
                    "dtype": torch.get_autocast_dtype(device),
                    "cache_enabled": torch.is_autocast_cache_enabled(),
                }
            )
    return found


@contextmanager
def recompute_context(
    module: nn.Module, stream: RandomStream, samples: Tensor | None, rng: RngSnapshot | None = None
) -> Iterator[None]:
    """Around a forward that was done before: the same masks, and what was counted then is not counted again.

    `drawn` are torch's generators as they were then; after it they are as they were before.
    """
    now, stream.samples = stream.samples, samples
    before = RngSnapshot()
    if rng is not None:
        rng.restore()
    parts: list[Any] = [part for part in module.modules() if _tracks_statistics(part)]
    counting = [(part, part.momentum, part.num_batches_tracked.clone()) for part in parts]
    for part in parts:
        part.momentum = 0.0
    tallied: list[Any] = [part for part in module.modules() if hasattr(part, "counts_load")]
    for part in tallied:
        part.counts_load = False
    try:
        yield
    finally:
        before.restore()
        stream.samples = now
        for part in tallied:
            part.counts_load = True
        for part, momentum, count in counting:
            part.momentum = momentum
            part.num_batches_tracked.copy_(count)


def _tracks_statistics(module: Any) -> bool:
    """Keeps running statistics, as every BatchNorm does."""
    return isinstance(getattr(module, "num_batches_tracked", None), Tensor)
