"""Counts collectives for real: a dispatch mode that sees torch's own operators, and nothing of Echelon."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Seen = Counter[tuple[str, tuple[int, ...], int]]
"""how often each (kind, global ranks of the group, bytes of the whole tensor) was issued"""


class CountCollectives(TorchDispatchMode):
    """Backward on CPU runs in the calling thread, so its collectives are seen too; each counts when it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Seen = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d" and "recv" not in func._schema.name:  # the other end of a send
            self._note(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        group = next(_ranks(arg) for arg in args if _is_group(arg))
        # The whole tensor is the reduced one, the output of an all-gather, the input of a reduce-scatter.
        kinds: dict[str, tuple[str, Any]] = {
            "allreduce_": ("all_reduce", args[0]),
            "_allgather_base_": ("all_gather", args[0]),
            "allgather_into_tensor_coalesced_": ("all_gather", args[0]),
            "_reduce_scatter_base_": ("reduce_scatter", args[1]),
            "reduce_scatter_tensor_coalesced_": ("reduce_scatter", args[1]),
            "broadcast_": ("broadcast", args[0]),
            "reduce_": ("reduce", args[0]),
            "alltoall_base_": ("all_to_all", args[1]),
            "send": ("send", args[0]),
        }
        kind, whole = kinds.get(name, (name, []))  # an unexpected operator is counted under its own name
        tensors = [whole] if isinstance(whole, Tensor) else whole
        self.seen[kind, group, sum(t.numel() * t.element_size() for t in tensors)] += 1


def _is_group(value: Any) -> bool:
    return type(value).__name__ == "ScriptObject" and "ProcessGroup" in str(value._type())


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
