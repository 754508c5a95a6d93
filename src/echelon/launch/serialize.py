"""Serialization of values between processes: pickle, with every tensor by value.

torch pickles the full storage of a tensor, even for a small view of it, and multiprocessing passes a file descriptor
that lives as long as the sender. Here only the elements are serialized.
"""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

import torch


def serialize(value: Any) -> bytes:
    """Serialize a value. Tensors are copied to the CPU and lose their autograd history."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


def deserialize(data: bytes) -> Any:
    """Deserialize a value. Only for data of this program's own processes: unpickling can run code."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        # Importing DTensor costs a second; without the import no value can be one.
        module = sys.modules.get("torch.distributed.tensor")
        if module is not None and isinstance(value, module.DTensor):
            raise TypeError(
                f"a DTensor cannot leave its ranks (shape {tuple(value.shape)}, placements {value.placements}); "
                "send value.full_tensor() or value.to_local()"
            )
        # Other subclasses of Tensor, and layouts without plain elements, use torch's own pickling.
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_quantized:
            return NotImplemented
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        elements = pickle.PickleBuffer(flat.view(torch.uint8).numpy())
        grad = value.requires_grad and value.is_leaf
        return _rebuild, (type(value), elements, value.dtype, tuple(value.shape), grad)


def _rebuild(
    kind: type[torch.Tensor], elements: bytearray, dtype: torch.dtype, shape: tuple[int, ...], grad: bool
) -> torch.Tensor:
    # frombuffer refuses an empty buffer.
    flat = torch.frombuffer(elements, dtype=dtype) if len(elements) else torch.empty(0, dtype=dtype)
    value = flat.reshape(shape)
    return torch.nn.Parameter(value, requires_grad=grad) if kind is torch.nn.Parameter else value.requires_grad_(grad)
