"""The index of a checkpoint, as data and as JSON. No torch.

[Note: a checkpoint's directory]

    step-00000100/
      part-00000.safetensors   boxes of logical tensors, dense, under names like `model.head.weight[0:3,0:64]`
      part-00001.safetensors   one file per rank that wrote; a reader does not need to know which rank wrote what
      index.json               every tensor: dtype, shape, checksums, and where each of its boxes is stored; metadata
      index.sha256             of index.json, as `sha256sum -c` reads it

A reader opens no other file of the directory.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from echelon.checkpoint.tensor_slices import Box, box_shape, intersect, numel

FORMAT = 1
INDEX_FILE, DIGEST_FILE = "index.json", "index.sha256"
PAGE_BYTES = 4096
"""bytes of a memory page, a multiple of a disk's block; the tensors of a file start at one"""

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""bytes of an element, by safetensors' dtype names"""


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read, or does not match the model."""


@dataclass(frozen=True)
class StoredSlice:
    """A box of a tensor in a file."""

    file: str
    offset: int
    """of the first byte, from the start of the file"""
    box: Box
    checksum: tuple[int, int]
    """see checksums.py"""


@dataclass(frozen=True)
class TensorRecord:
    """A logical tensor: dtype, shape, and where its boxes are stored."""

    dtype: str
    """safetensors' name"""
    shape: tuple[int, ...]
    slices: tuple[StoredSlice, ...]


@dataclass(frozen=True)
class FileRecord:
    """Size of a file, and the checksum of its header."""

    nbytes: int
    header_sha256: str


@dataclass(frozen=True)
class CheckpointIndex:
    """Everything that a reader needs to know of a checkpoint."""

    step: int
    metadata: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    hash: str = ""
    """of the logical state; the same in every layout"""
    format: int = field(default=FORMAT)

    def to_json(self) -> str:
        tensors = {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "slices": [
                    {"file": s.file, "at": s.offset, "box": s.box, "sums": [f"{word:016x}" for word in s.checksum]}
                    for s in tensor.slices
                ],
            }
            for name, tensor in sorted(self.tensors.items())
        }
        files = {name: {"bytes": file.nbytes, "header": file.header_sha256} for name, file in self.files.items()}
        header = {"format": self.format, "step": self.step, "hash": self.hash, "facts": self.metadata}
        return json.dumps({**header, "files": files, "tensors": tensors}, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CheckpointIndex:
        read = json.loads(text)
        if read.get("format") != FORMAT:
            raise CheckpointError(f"unknown checkpoint format (expected {FORMAT}, got {read.get('format')})")
        tensors = {}
        for name, tensor in read["tensors"].items():
            slices = tuple(_parse_slice(stored) for stored in tensor["slices"])
            tensors[name] = TensorRecord(tensor["dtype"], tuple(tensor["shape"]), slices)
        files = {name: FileRecord(file["bytes"], file["header"]) for name, file in read["files"].items()}
        return cls(read["step"], read["facts"], files, tensors, read["hash"])

    def check_complete(self) -> None:
        """Check that every element is stored exactly once, inside its file."""
        faults = []
        for name, tensor in self.tensors.items():
            count = sum(numel(stored.box) for stored in tensor.slices)
            if count != math.prod(tensor.shape) or any_overlap([stored.box for stored in tensor.slices]):
                faults.append(f"{name} ({count} of {math.prod(tensor.shape)} elements)")
            for stored in tensor.slices:
                file, nbytes = self.files.get(stored.file), numel(stored.box) * DTYPE_BYTES[tensor.dtype]
                if file is None or stored.offset < 0 or stored.offset + nbytes > file.nbytes:
                    faults.append(f"{name} (outside of {stored.file})")
        if faults:
            raise CheckpointError(f"the checkpoint does not store every element exactly once: {abbreviate(faults)}")


def _parse_slice(stored: Mapping[str, Any]) -> StoredSlice:
    a, b = (int(word, 16) for word in stored["sums"])
    return StoredSlice(stored["file"], stored["at"], tuple((low, high) for low, high in stored["box"]), (a, b))


def any_overlap(boxes: Sequence[Box]) -> bool:
    """Whether two boxes overlap. Sorted by their first dimension, only neighbours need to be compared."""
    order = sorted(boxes)
    for number, box in enumerate(order):
        for other in order[number + 1 :]:
            if box and other[0][0] >= box[0][1]:
                break
            if intersect(box, other) is not None:
                return True
    return False


def digest_line(text: str) -> str:
    return f"{hashlib.sha256(text.encode()).hexdigest()}  {INDEX_FILE}\n"


def parse_index(text: bytes | bytearray, digest: bytes | bytearray, where: str) -> CheckpointIndex:
    if digest.decode(errors="replace") != digest_line(text.decode(errors="replace")):
        raise CheckpointError(
            f"the checkpoint is corrupt ({where}/{INDEX_FILE} does not match {DIGEST_FILE}); use another checkpoint"
        )
    return CheckpointIndex.from_json(text.decode())


@dataclass(frozen=True)
class FileRegion:
    """A box that a rank writes, and its offset after the header of its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    offset: int

    @property
    def nbytes(self) -> int:
        return numel(self.box) * DTYPE_BYTES[self.dtype]

    @property
    def key(self) -> str:
        """The tensor's name in the file."""
        if box_shape(self.box) == self.shape:
            return self.name
        return f"{self.name}[{','.join(f'{low}:{high}' for low, high in self.box)}]"


def safetensors_header(regions: Iterable[FileRegion]) -> bytes:
    """The header of a safetensors file, padded with blanks to full pages."""
    table = {
        region.key: {
            "dtype": region.dtype,
            "shape": list(box_shape(region.box)),
            "data_offsets": [region.offset, region.offset + region.nbytes],
        }
        for region in regions
    }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % PAGE_BYTES)
    return len(text).to_bytes(8, "little") + text


def abbreviate(names: Sequence[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f", and {len(names) - limit} more" if len(names) > limit else "")
