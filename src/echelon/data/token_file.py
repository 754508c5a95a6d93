"""Token files: tokens on disk, memory-mapped, with a readable header.

    +---------------------------+------------------------+---------+----------------------------+
    | header, 4096 bytes        | tokens                 | padding | document offsets           |
    | JSON, padded with spaces  | uint16 or uint32, LE   | to 8    | int64, LE, starts in order |
    +---------------------------+------------------------+---------+----------------------------+

The header has a fixed size because the counts and the checksum are known only after the last token was streamed out. It
contains its own CRC, which is checked when a file is opened; the payload's SHA-256 is compared once per run (see
token_cache.py), since that reads the full file. The same text always gives the same bytes.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

MAGIC = "echelon-tokens"
VERSION = 1
HEADER_BYTES = 4096
_PREFIX = b'{"magic": "' + MAGIC.encode() + b'"'
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_OFFSET = np.dtype("<i8")
_CHUNK_BYTES = 1 << 22

IntArray = npt.NDArray[np.int64]
AnyIntArray = npt.NDArray[np.integer[Any]]
AnyPath = str | os.PathLike[str]


class TokenFileError(ValueError):
    """A token file cannot be written or read, or does not match its header."""


@dataclass(frozen=True, kw_only=True)
class TokenFileHeader:
    """The header of a token file."""

    dtype: str
    """`uint16` or `uint32`, the smallest that holds the vocabulary."""
    num_tokens: int
    """Tokens in the file, including the ends of documents."""
    num_documents: int
    """Documents in the file; each has at least one token and ends with `eos`."""
    vocab_size: int
    """Every token is below this."""
    eos: int
    """The token that ends a document."""
    tokenizer: str
    """The tokenizer's name; files of one run must agree on it."""
    sha256: str
    """Checksum of everything after the header."""

    def encode(self) -> bytes:
        fields = {"magic": MAGIC, "version": VERSION, **asdict(self)}
        text = json.dumps({**fields, "crc32": zlib.crc32(json.dumps(fields).encode())}).encode()
        if len(text) >= HEADER_BYTES:
            raise TokenFileError(
                f"the header of a token file is too long ({len(text)} bytes); shorten the tokenizer's name"
            )
        return text.ljust(HEADER_BYTES - 1) + b"\n"

    @property
    def offsets_start(self) -> int:
        """Position in the file, in bytes, of the first document offset."""
        end = HEADER_BYTES + self.num_tokens * _DTYPES[self.dtype].itemsize
        return end + -end % _OFFSET.itemsize

    @property
    def file_bytes(self) -> int:
        return self.offsets_start + self.num_documents * _OFFSET.itemsize


class TokenFile:
    """A token file opened for reading. Opening reads one page, whatever the size."""

    def __init__(self, path: AnyPath) -> None:
        self.path = Path(path)
        # Opened once: a writer may replace the file between two opens. The opened one stays intact while it is mapped.
        try:
            with self.path.open("rb") as file:
                self.header = header = _read_header(file, self.path)
                size = os.fstat(file.fileno()).st_size
                if size != header.file_bytes:
                    what = "is truncated" if size < header.file_bytes else "has bytes after its end"
                    raise TokenFileError(
                        f"token file {what} ({self.path}: {size} bytes, expected {header.file_bytes}); write it again"
                    )
                # A plain array, not a memmap: creating the subclass costs more than the small slices of it.
                self._bytes = np.asarray(np.memmap(file, np.uint8, "r"))
        except OSError as error:
            raise TokenFileError(f"cannot read token file ({self.path}: {error.strerror}); check data.path") from error
        dtype = _DTYPES[header.dtype]
        self.tokens: AnyIntArray = self._bytes[HEADER_BYTES:][: header.num_tokens * dtype.itemsize].view(dtype)
        self.offsets: IntArray = self._bytes[header.offsets_start :].view(_OFFSET)

    def verify(self) -> None:
        """Read the full file and compare it with the header's checksum."""
        sha256 = hashlib.sha256(self._bytes[HEADER_BYTES:].data).hexdigest()
        if sha256 != self.header.sha256:
            raise TokenFileError(
                f"token file is corrupt ({self.path}: sha256 {sha256[:12]}…, "
                f"expected {self.header.sha256[:12]}…); write it again"
            )


def is_token_file(path: AnyPath) -> bool:
    """Whether the file starts like a token file. Its contents may still be corrupt."""
    path = Path(path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_PREFIX)) == _PREFIX


def _read_header(file: BinaryIO, path: Path) -> TokenFileHeader:
    raw = file.read(HEADER_BYTES)
    if not raw.startswith(_PREFIX):
        raise TokenFileError(f"not a token file ({path}: begins with {raw[:16]!r}); tokenise the text first")
    damaged = TokenFileError(f"the header of a token file is damaged ({path}); write it again")
    if len(raw) < HEADER_BYTES:
        raise TokenFileError(
            f"token file is truncated ({path}: {len(raw)} bytes, the header alone has {HEADER_BYTES}); write it again"
        )
    try:
        fields = json.loads(raw)
    except ValueError:
        raise damaged from None
    crc32 = fields.pop("crc32", None)
    if crc32 != zlib.crc32(json.dumps(fields).encode()):
        raise damaged
    # After the CRC: a wrong version is then real, not a flipped bit.
    version = fields.pop("version", None)
    if version != VERSION:
        raise TokenFileError(f"token file has another version ({path}: {version}, expected {VERSION}); write it again")
    del fields["magic"]
    try:
        header = TokenFileHeader(**fields)
    except TypeError:
        raise damaged from None
    if header.dtype not in _DTYPES:
        raise damaged
    return header


class TokenWriter:
    """Writes a token file document by document, as a context manager; the file appears only when it is complete.

    Several writers may write the same path at once: each has its own temporary file, and the last one to finish
    replaces the others' result atomically.
    """

    def __init__(self, path: AnyPath, *, vocab_size: int, eos: int, tokenizer: str) -> None:
        if not 0 <= eos < vocab_size <= 1 << 32:
            raise TokenFileError(
                f"eos must be a token of the vocabulary (eos {eos}, vocabulary {vocab_size}, at most {1 << 32}); "
                "check the tokenizer"
            )
        self.path = Path(path)
        dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        unknown: dict[str, Any] = {"num_tokens": 0, "num_documents": 0, "sha256": ""}
        self._header = TokenFileHeader(dtype=dtype, vocab_size=vocab_size, eos=eos, tokenizer=tokenizer, **unknown)
        self._num_tokens = self._num_documents = 0
        self._digest = hashlib.sha256()
        # A header that is too long fails here rather than after hours of writing.
        self._header.encode()

    def __enter__(self) -> Self:
        # Not tempfile's name: such a file is readable by its owner only, also after the rename.
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            with contextlib.ExitStack() as stack:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # The offsets of a large corpus may not fit in memory, so they are buffered on disk.
                self._offsets: BinaryIO = stack.enter_context(tempfile.TemporaryFile(dir=self.path.parent))
                self._file: BinaryIO = stack.enter_context(self._temporary.open("xb"))
                self._file.seek(HEADER_BYTES)
                stack.pop_all()
        except OSError as error:
            raise self._cannot_write(error) from error
        return self

    def write_document(self, pieces: Iterable[npt.ArrayLike]) -> None:
        """Write one document, given in pieces of any length, and its end. A document without tokens is skipped."""
        start = self._num_tokens
        for piece in pieces:
            tokens = np.asarray(piece)
            if tokens.size:
                self._append(tokens)
        if self._num_tokens > start:
            self._append(np.array([self._header.eos]))
            self._write(self._offsets, np.array(start, _OFFSET).tobytes())
            self._num_documents += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as fault:
            raise self._cannot_write(fault) from fault
        finally:
            # After a success the file is closed and renamed already. After a failure, closing flushes the rest and may
            # fail again: the first error is the one to raise.
            for file in (self._offsets, self._file):
                with contextlib.suppress(OSError):
                    file.close()
            self._temporary.unlink(missing_ok=True)

    def _append(self, tokens: AnyIntArray) -> None:
        if tokens.dtype.kind not in "iu" or int(tokens.min()) < 0 or int(tokens.max()) >= self._header.vocab_size:
            raise TokenFileError(
                f"token outside the vocabulary ({tokens.dtype} from {tokens.min()} to {tokens.max()}, "
                f"vocabulary {self._header.vocab_size}); check the tokenizer"
            )
        data = tokens.astype(_DTYPES[self._header.dtype]).tobytes()
        self._write(self._file, data)
        self._digest.update(data)
        self._num_tokens += tokens.size

    def _write(self, file: BinaryIO, data: bytes) -> None:
        # Only around the write: an error of the iterator that produces the pieces is not a write error.
        try:
            file.write(data)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _finish(self) -> None:
        if not self._num_documents:
            raise TokenFileError(f"no text to write ({self.path}); give at least one document that is not empty")
        header = replace(self._header, num_tokens=self._num_tokens, num_documents=self._num_documents)
        padding = bytes(header.offsets_start - self._file.tell())
        self._file.write(padding)
        self._digest.update(padding)
        self._offsets.seek(0)
        while chunk := self._offsets.read(_CHUNK_BYTES):
            self._digest.update(chunk)
            self._file.write(chunk)
        self._file.seek(0)
        self._file.write(replace(header, sha256=self._digest.hexdigest()).encode())
        self._file.flush()
        # Without this a crash of the node may leave an empty file under the name.
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self.path)

    def _cannot_write(self, error: OSError) -> TokenFileError:
        try:
            free = f", {shutil.disk_usage(self.path.parent).free / 1e6:.0f} MB free"
        except OSError:
            free = ""
        return TokenFileError(
            f"cannot write token file ({self.path}: {error.strerror or error}{free}); choose another folder"
        )
