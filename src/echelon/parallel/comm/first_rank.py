"""What the first rank of an axis finds, for all of them; and whether all of them have the same.

A search with a time limit may end differently on each rank. One of them searches, and sends its answer as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from zlib import crc32

import torch

from echelon.parallel.comm.mesh_axis import MeshAxis


def call_on_first_rank(call: Callable[[], dict[str, Any]], axis: MeshAxis, device: torch.device | None) -> Any:
    """Return what `call` returns on the first rank, or raise its ValueError, on every rank of the axis."""
    answer = json.loads(_broadcast(_answer(call) if axis.index == 0 else "", axis, device))
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["value"]


def _answer(call: Callable[[], dict[str, Any]]) -> str:
    try:
        return json.dumps({"value": call()})
    except ValueError as error:
        return json.dumps({"error": str(error)})


def _broadcast(text: str, axis: MeshAxis, device: torch.device | None) -> str:
    """Send the first rank's text to all ranks."""
    sent = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    length = int(axis.broadcast(torch.tensor(len(sent), device=device)))
    received = sent if axis.index == 0 else sent.new_empty(length)
    return bytes(axis.broadcast(received).tolist()).decode()


def first_different_rank(value: object, axis: MeshAxis, device: torch.device | None) -> int | None:
    """Return the first rank of the axis whose value has another text than that of the first; None if none has."""
    checksums = axis.all_gather(torch.tensor([crc32(repr(value).encode())], device=device)).flatten().tolist()
    pairs = zip(axis.ranks, checksums, strict=True)
    return next((rank for rank, checksum in pairs if checksum != checksums[0]), None)
