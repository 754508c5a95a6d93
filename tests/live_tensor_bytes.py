"""Bytes of all live tensors, on a CPU too: a dispatch mode that tracks every storage."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LivingBytes(TorchDispatchMode):
    """Of tensors that were made inside. Backward on CPU runs in the calling thread, so its tensors are seen too."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage(), given)
        return out

    def after_collectives(self) -> int:
        """Bytes alive once gloo's threads, which hold a collective's tensors a little longer, have dropped them."""
        gc.collect()
        readings = []
        for _ in range(5):
            time.sleep(0.01)
            readings.append(self.now)
        return min(readings)

    def _note(self, storage: Any, given: set[Any]) -> None:
        if storage in given or storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.now -= size
