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
from typing import Any, TypeVar

from echelon.checkpoint.tensor_slices import Box, box_shape, intersect, numel
from echelon.input_file import MIB, parse_json, plain_name

FORMAT = 1
INDEX_FILE, DIGEST_FILE = "index.json", "index.sha256"
PAGE_BYTES = 4096
"""bytes of a memory page, a multiple of a disk's block; the tensors of a file start at one"""

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""bytes of an element, by safetensors' dtype names"""
MAX_INDEX_BYTES = 1024 * MIB
"""some millions of slices"""
KIND_NAMES = {int: "an integer >= 0", str: "a text", dict: "an object", list: "a list"}

T = TypeVar("T", int, str, dict[str, Any], list[Any])


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
        """Parse the text of `to_json`. Raises ValueError at the first value of another type."""
        read = parse_json(text)
        if _expect(read, dict, "the index").get("format") != FORMAT:
            raise CheckpointError(f"unknown format (expected {FORMAT}, got {str(read.get('format'))[:40]})")
        files = {
            name: FileRecord(_take(file, "bytes", int, name), _take(file, "header", str, name))
            for name, file in _take(read, "files", dict).items()
        }
        if outside := [name for name in files if not plain_name(name)]:
            raise CheckpointError(f"names of files outside of the directory: {abbreviate(outside)}")
        tensors = {name: _parse_tensor(name, tensor) for name, tensor in _take(read, "tensors", dict).items()}
        return cls(_take(read, "step", int), _take(read, "facts", dict), files, tensors, _take(read, "hash", str))

    def fact(self, key: str, kind: type[T], default: T) -> T:
        """Return an entry of the metadata, or the default. Raises CheckpointError if it is of another type."""
        return _expect(self.metadata.get(key, default), kind, f"{INDEX_FILE} of the checkpoint: facts.{key}")

    def check_complete(self) -> None:
        """Check that every element is stored exactly once, inside its file."""
        faults = []
        for name, tensor in self.tensors.items():
            count = sum(numel(stored.box) for stored in tensor.slices)
            if not all(_inside(stored.box, tensor.shape) for stored in tensor.slices):
                faults.append(f"{name} (a slice is not inside {list(tensor.shape)})")
            elif count != math.prod(tensor.shape) or any_overlap([stored.box for stored in tensor.slices]):
                faults.append(f"{name} ({count} of {math.prod(tensor.shape)} elements)")
            for stored in tensor.slices:
                file, nbytes = self.files.get(stored.file), numel(stored.box) * DTYPE_BYTES[tensor.dtype]
                if file is None or stored.offset < 0 or stored.offset + nbytes > file.nbytes:
                    faults.append(f"{name} (outside of {stored.file})")
        if faults:
            raise CheckpointError(f"the checkpoint does not store every element exactly once: {abbreviate(faults)}")


def _expect(value: Any, kind: type[T], what: str) -> T:
    # Not isinstance: true is no number.
    if type(value) is not kind or (type(value) is int and value < 0):
        raise CheckpointError(f"{what} is not {KIND_NAMES[kind]} ({str(value)[:40]})")
    return value


def _take(table: Any, key: str, kind: type[T], where: str = "the index") -> T:
    return _expect(_expect(table, dict, where).get(key), kind, f"{where}: {key}")


def _parse_tensor(name: str, tensor: Any) -> TensorRecord:
    dtype, shape = _take(tensor, "dtype", str, name), _take(tensor, "shape", list, name)
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{name}: dtype is unknown ({dtype[:40]})")
    sizes = tuple(_expect(size, int, f"{name}: a size") for size in shape)
    slices = tuple(_parse_slice(name, stored) for stored in _take(tensor, "slices", list, name))
    return TensorRecord(dtype, sizes, slices)


def _parse_slice(name: str, stored: Any) -> StoredSlice:
    match _take(stored, "sums", list, name), _take(stored, "box", list, name):
        case [str(a), str(b)], box if all(isinstance(side, list) and len(side) == 2 for side in box):
            sides = tuple((_expect(low, int, f"{name}: box"), _expect(high, int, f"{name}: box")) for low, high in box)
            checksum = int(a, 16), int(b, 16)
            return StoredSlice(_take(stored, "file", str, name), _take(stored, "at", int, name), sides, checksum)
    raise CheckpointError(f"{name}: a slice without two sums and a box of ranges")


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box) == len(shape) and all(low <= high <= size for (low, high), size in zip(box, shape, strict=True))


def any_overlap(boxes: Sequence[Box]) -> bool:
    """Whether two boxes overlap. Sorted by the dimension of most cuts, only neighbours need to be compared."""
    dims = range(len(boxes[0])) if boxes else range(0)
    cut = max(dims, key=lambda dim: len({box[dim][0] for box in boxes}), default=0)
    order = sorted(boxes, key=lambda box: box[cut : cut + 1])
    for number, box in enumerate(order):
        for other in order[number + 1 :]:
            if box and other[cut][0] >= box[cut][1]:
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
    try:
        index = CheckpointIndex.from_json(text.decode())
        index.check_complete()
        return index
    except ValueError as error:
        raise CheckpointError(
            f"the checkpoint is corrupt ({where}/{INDEX_FILE}: {error}); use another checkpoint"
        ) from error


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
