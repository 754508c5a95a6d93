"""Activation offload (`offload=activations`): saved activations are on the host between forward and backward.

[Note: layer by layer]

    forward       layer 0      layer 1      layer 2      layer 3          backward    layer 3      layer 2      layer 1
    to host                    | 0's saved  | 1's saved  | 2's saved
    to device                                                                         | 2's        | 1's        | 0's

The saved tensors of a layer are copied to the host while the next layer computes, and their memory is free when the one
after that starts. When a layer's backward starts, the previous layer's are prefetched. So the device holds about two
layers' activations. The last layer's stay: backward starts with it. (In a pipeline other microbatches come first, and
they are offloaded too.)

torch's saved-tensor hooks see what autograd saves inside a layer; of a checkpointed layer, its input. Each storage is
copied once, however many views of it are saved. Parameters and small tensors stay. Host buffers are reused from step to
step.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from echelon.memory.checkpointing.checkpoint_wrapper import iter_tensors
from echelon.memory.offload.host_transfer import COMPLETED, CopyEvent, HostBuffer, HostLink

MIN_OFFLOAD_BYTES = {"cuda": 1 << 20, "cpu": 1 << 10}
"""smaller storages stay on the device"""


class HostBufferPool:
    """Reusable host buffers, by size."""

    def __init__(self, link: HostLink):
        self.link = link
        self.nbytes = 0
        self._free: dict[int, list[HostBuffer]] = {}

    def acquire(self, nbytes: int) -> HostBuffer:
        free = self._free.get(nbytes)
        if not free:
            self.nbytes += nbytes
            return HostBuffer(self.link.empty_pinned(nbytes, torch.uint8))
        buffer = free.pop()
        buffer.pending_copy.wait()  # order the next copy after the pending one
        return buffer

    def release(self, buffer: HostBuffer, copy: CopyEvent) -> None:
        buffer.pending_copy = copy
        self._free.setdefault(len(buffer.memory), []).append(buffer)


class OffloadedStorage:
    """One storage on the host; lives as long as autograd holds a view of it."""

    def __init__(self, pool: HostBufferPool, storage: torch.UntypedStorage):
        self._pool, self._buffer = pool, pool.acquire(storage.nbytes())
        self.copy_down = pool.link.copy_to_host(_as_bytes(storage), self._buffer.memory, "activations")
        self._up = COMPLETED
        self._back: Tensor | None = None

    def prefetch(self) -> None:
        """Start the copy to the device."""
        if self._back is None:
            link = self._pool.link
            self._back = torch.empty(len(self._buffer.memory), dtype=torch.uint8, device=link.device)
            self._up = link.copy_to_device(self._buffer.memory, self._back, "activations")

    def restore(self) -> torch.UntypedStorage:
        self.prefetch()
        self._up.wait()
        assert self._back is not None
        return self._back.untyped_storage()

    def __del__(self) -> None:
        # A prefetched copy that was never read: its buffer must not be reused during the copy.
        self._up.wait()
        self._pool.release(self._buffer, self._up)


@dataclass(frozen=True)
class OffloadedView:
    """What autograd saves in place of an offloaded tensor."""

    storage: OffloadedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def restore(self) -> Tensor:
        storage = self.storage.restore()
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)


LayerPass = list[weakref.WeakSet[OffloadedStorage]]
"""one microbatch's pass through consecutive layers: the storages that each offloaded"""


class ActivationOffloader:
    """Offloads the saved activations of a rank's layers."""

    def __init__(self, link: HostLink, *, keep_last: bool):
        self.link, self.pool = link, HostBufferPool(link)
        self._min_bytes, self._keep_last = MIN_OFFLOAD_BYTES[link.device.type], keep_last
        self._parameters: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._offloaded: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[int, weakref.ref[OffloadedStorage]]] = (
            weakref.WeakKeyDictionary()
        )
        self._in_transfer: deque[list[tuple[CopyEvent, torch.UntypedStorage]]] = deque()
        """by layer: storages that must stay allocated until their copies complete"""
        self._pass: LayerPass = []
        self._layer_index = -2

    def apply(self, model: nn.Module, names: Sequence[str]) -> None:
        """Wrap the forward of each layer, in order."""
        layers: list[tuple[int, Any]] = [(index, model.get_submodule(name)) for index, name in enumerate(names)]
        local = [(index, module) for index, module in layers if not isinstance(module, nn.Identity)]
        for position, (index, module) in enumerate(local):
            offloads = position < len(local) - self._keep_last
            module.forward = partial(self._forward, index, offloads, module.forward)

    def exclude(self, tensors: Sequence[Tensor]) -> None:
        """Exclude parameters from offload."""
        for tensor in tensors:
            self._parameters.add(tensor.untyped_storage())

    def _forward(self, index: int, offloads: bool, forward: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **named)
        self._enter_layer(index)
        with saved_tensors_hooks(self._pack, _unpack) if offloads else nullcontext():
            output = forward(*args, **named)
        return self._hook_prefetch(output)

    def _enter_layer(self, index: int) -> None:
        if index != self._layer_index + 1:
            self._pass = []
        self._layer_index = index
        self._pass.append(weakref.WeakSet())
        self._in_transfer.append([])
        self._wait_transfers(2)

    def _hook_prefetch(self, output: Any) -> Any:
        """Prefetch this and the previous layer's storages when this layer's backward starts."""
        layers = self._pass[-1:-3:-1]

        def before_backward(_gradient: Tensor) -> None:
            self._wait_transfers(0)
            for storages in layers:
                for storage in storages:
                    storage.prefetch()

        for tensor in iter_tensors(output, in_dataclasses=True):
            if tensor.requires_grad:
                tensor.register_hook(before_backward)
        return output

    def _wait_transfers(self, num_layers: int) -> None:
        """Wait for the copies to the host, except of the last layers, and free their device memory."""
        while len(self._in_transfer) > num_layers:
            for copy, _ in self._in_transfer.popleft():
                copy.wait()

    def _pack(self, tensor: Tensor) -> Tensor | OffloadedView:
        # Detached: its grad_fn, which may be what saves it, would keep itself alive.
        resident = tensor if tensor.is_leaf else tensor.detach()
        if type(tensor) is not Tensor or not tensor.is_floating_point() or tensor.device != self.link.device:
            return resident
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._min_bytes or storage in self._parameters:
            return resident
        version, reference = self._offloaded.get(storage, (-1, None))
        offloaded = reference() if reference is not None and version == tensor._version else None
        if offloaded is None:
            offloaded = OffloadedStorage(self.pool, storage)
            self._offloaded[storage] = tensor._version, weakref.ref(offloaded)
            self._in_transfer[-1].append((offloaded.copy_down, storage))
            self._pass[-1].add(offloaded)
        return OffloadedView(offloaded, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _unpack(packed: Tensor | OffloadedView) -> Tensor:
    return packed.restore() if isinstance(packed, OffloadedView) else packed


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return tensor.set_(storage, 0, (storage.nbytes(),), (1,))
