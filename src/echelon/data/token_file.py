"""Token files: tokens on disk, memory-mapped, with a readable header.

    +--------------------+----------------------+---------+----------------------+--------------+-------------------+
    | header, 4096 bytes | tokens               | padding | document offsets     | loss mask    | block checksums   |
    | JSON, with spaces  | uint16 or uint32, LE | to 8    | int64, LE, in order  | bits, LE     | CRC-32, uint32 LE |
    +--------------------+----------------------+---------+----------------------+--------------+-------------------+
                         <------------- in blocks of 64 KiB, each with its checksum ------------>

The header has a fixed size because the counts and the checksum are known only after the last token was streamed out.
The loss mask has a bit for each token, set where the token is a target, and is filled up to 8 bytes; a file in which
every token is a target has none.
The same text always gives the same bytes.

[Note: what is checked, and when]

    opening     the header's own CRC and types, the table of checksums, every document offset
                of a file up to VERIFY_BYTES: everything, and the SHA-256 of the header
    reading     of a larger file, each block when one of its tokens is first read: its checksum, and that every token
                is of the vocabulary

The loss mask is read like the tokens. So no token that was not written by a `TokenWriter` is trained on, and a terabyte
is opened as quickly as a page. Files of version 1 have no block checksums and are read in full when they are opened;
files of version 2 have no loss mask.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from echelon.input_file import MIB, InputFileError, open_input, parse_json

MAGIC = "echelon-tokens"
VERSION = 3
HEADER_BYTES = 4096
_PREFIX = b'{"magic": "' + MAGIC.encode() + b'"'
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_OFFSET, _CHECKSUM = np.dtype("<i8"), np.dtype("<u4")
BLOCK_BYTES = 1 << 16
VERIFY_BYTES = 64 * MIB
"""a file up to this size is read in full when it is opened"""
_CHUNK_BYTES = 1 << 22

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
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
    """Checksum of the tokens, the padding, the offsets and the loss mask."""
    blocks_crc32: int | None = None
    """CRC-32 of the block checksums; none in a file of version 1."""
    num_targets: int | None = None
    """Tokens that the loss mask makes targets; none in a file without a mask, where every token is one."""

    def encode(self) -> bytes:
        fields = {"magic": MAGIC, "version": VERSION if self.blocks_crc32 is not None else 1, **asdict(self)}
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
    def mask_start(self) -> int:
        """Position of the loss mask: the end of the document offsets."""
        return self.offsets_start + self.num_documents * _OFFSET.itemsize

    @property
    def blocks_start(self) -> int:
        """Position of the first block checksum: the end of what the checksums cover."""
        return self.mask_start + (-(-self.num_tokens // 64) * 8 if self.num_targets is not None else 0)

    @property
    def num_blocks(self) -> int:
        return -(-(self.blocks_start - HEADER_BYTES) // BLOCK_BYTES)

    @property
    def file_bytes(self) -> int:
        return self.blocks_start + (self.num_blocks * _CHECKSUM.itemsize if self.blocks_crc32 is not None else 0)


class TokenFile:
    """A token file opened for reading; see [Note: what is checked, and when]."""

    def __init__(self, path: AnyPath) -> None:
        self.path = Path(path)
        # Opened once: a writer may replace the file between two opens. The opened one stays intact while it is mapped.
        try:
            with open_input(self.path) as file:
                self.header = header = _read_header(file, self.path)
                size = os.fstat(file.fileno()).st_size
                if size != header.file_bytes:
                    what = "is truncated" if size < header.file_bytes else "has bytes after its end"
                    raise TokenFileError(
                        f"token file {what} ({self.path}: {size} bytes, expected {header.file_bytes}); write it again"
                    )
                # A plain array, not a memmap: creating the subclass costs more than the small slices of it.
                self._bytes = np.asarray(np.memmap(file, np.uint8, "r"))
        except InputFileError as error:
            raise TokenFileError(f"token file {error}; check data.path") from error
        except OSError as error:
            raise TokenFileError(f"cannot read token file ({self.path}: {error.strerror}); check data.path") from error
        dtype = _DTYPES[header.dtype]
        self._payload = self._bytes[HEADER_BYTES : header.blocks_start]
        self.tokens: AnyIntArray = self._payload[: header.num_tokens * dtype.itemsize].view(dtype)
        """without a check of their blocks, which `read` makes"""
        offsets = self._payload[header.offsets_start - HEADER_BYTES : header.mask_start - HEADER_BYTES]
        self.offsets: IntArray = offsets.view(_OFFSET)
        self._checksums = self._bytes[header.blocks_start :].view(_CHECKSUM)
        self._is_checked = np.zeros(header.num_blocks, bool)
        if header.blocks_crc32 is not None and zlib.crc32(self._checksums.data) != header.blocks_crc32:
            raise self._corrupt("the block checksums have changed")
        self._check_offsets()
        if header.blocks_crc32 is None or header.file_bytes <= VERIFY_BYTES:
            self.verify()

    def read(self, start: int, stop: int) -> AnyIntArray:
        """The tokens of a range, after a check of its blocks."""
        size = self.tokens.itemsize
        first, last = start * size // BLOCK_BYTES, -(-min(stop, len(self.tokens)) * size // BLOCK_BYTES)
        if not self._is_checked[first:last].all():
            self._check_blocks(first, last)
        return self.tokens[start:stop]

    def is_target(self, start: int, stop: int) -> BoolArray:
        """Whether each token of a range is a target, after a check of the blocks of the loss mask."""
        stop = min(stop, len(self.tokens))
        if self.header.num_targets is None or stop <= start:
            return np.ones(max(0, stop - start), bool)
        begin = self.header.mask_start - HEADER_BYTES
        first_byte, last_byte = begin + start // 8, begin + -(-stop // 8)
        first, last = first_byte // BLOCK_BYTES, -(-last_byte // BLOCK_BYTES)
        if not self._is_checked[first:last].all():
            self._check_blocks(first, last)
        bits = np.unpackbits(self._payload[first_byte:last_byte], bitorder="little")
        return bits[start % 8 : start % 8 + stop - start].astype(bool)

    def verify(self) -> None:
        """Read the full file and compare it with the header's checksum and vocabulary."""
        sha256 = hashlib.sha256(self._payload.data).hexdigest()
        if sha256 != self.header.sha256:
            raise self._corrupt(f"sha256 {sha256[:12]}…, expected {self.header.sha256[:12]}…")
        self._check_blocks(0, self.header.num_blocks)

    def _check_blocks(self, first: int, last: int) -> None:
        per_block = BLOCK_BYTES // self.tokens.itemsize
        for block in range(first, last):
            if len(self._checksums):
                data = self._payload[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
                if zlib.crc32(data.data) != self._checksums[block]:
                    raise self._corrupt(f"the bytes of block {block} have changed")
            largest = self.tokens[block * per_block : (block + 1) * per_block].max(initial=0)
            if largest >= self.header.vocab_size:
                raise self._corrupt(f"token {largest} is outside of the vocabulary of {self.header.vocab_size}")
            self._is_checked[block] = True

    def _check_offsets(self) -> None:
        """Check that documents start in order, the first at 0 and the last before the end."""
        if len(self._checksums):
            end = -(-(self.header.mask_start - HEADER_BYTES) // BLOCK_BYTES)
            self._check_blocks((self.header.offsets_start - HEADER_BYTES) // BLOCK_BYTES, end)
        in_order = self.offsets[0] == 0 and self.offsets[-1] < self.header.num_tokens
        for start in range(0, len(self.offsets), _CHUNK_BYTES):
            part = self.offsets[start : start + _CHUNK_BYTES + 1]
            in_order = in_order and bool((part[1:] > part[:-1]).all())
        if not in_order:
            raise self._corrupt("its document offsets are not in order")

    def _corrupt(self, what: str) -> TokenFileError:
        return TokenFileError(
            f"token file is corrupt ({self.path}: {what}); write it again, or remove it from the cache"
        )


def is_token_file(path: AnyPath) -> bool:
    """Whether the file starts like a token file. Its contents may still be corrupt."""
    try:
        with open_input(path) as file:
            return file.read(len(_PREFIX)) == _PREFIX
    except (InputFileError, OSError):
        return False


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
        fields = parse_json(raw)
    except ValueError:
        raise damaged from None
    crc32 = fields.pop("crc32", None)
    if crc32 != zlib.crc32(json.dumps(fields).encode()):
        raise damaged
    # After the CRC: a wrong version is then real, not a flipped bit.
    version = fields.pop("version", None)
    if type(version) is not int or not 1 <= version <= VERSION:
        found = str(version)[:40]
        raise TokenFileError(f"token file has another version ({path}: {found}, expected {VERSION}); write it again")
    del fields["magic"]
    try:
        header = TokenFileHeader(**fields)
    except TypeError:
        raise damaged from None
    if not _is_valid(header) or (header.blocks_crc32 is None) != (version == 1):
        raise damaged
    if header.num_targets is not None and version < 3:
        raise damaged
    return header


def _is_valid(header: TokenFileHeader) -> bool:
    """Whether every field has its type and a possible value."""
    texts = (header.dtype, header.tokenizer, header.sha256)
    numbers = (header.num_tokens, header.num_documents, header.vocab_size, header.eos)
    optional = [number for number in (header.blocks_crc32, header.num_targets) if number is not None]
    if not all(type(text) is str for text in texts) or not all(type(n) is int for n in (*numbers, *optional)):
        return False
    has_counts = 1 <= header.num_documents < header.num_tokens and 0 <= header.eos < header.vocab_size <= 1 << 32
    has_targets = header.num_targets is None or 1 <= header.num_targets <= header.num_tokens
    return has_counts and has_targets and header.dtype in _DTYPES


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
        self._eos = np.array(eos, _DTYPES[dtype]).tobytes()
        self._num_tokens = self._num_documents = 0
        self._mask: BinaryIO | None = None
        """a byte for each token, on disk, from the first document with a loss mask on"""
        self._num_targets = 0
        self._digest = hashlib.sha256()
        self._checksums, self._crc32, self._block_bytes = array("I"), 0, 0
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

    def write_document(self, pieces: Iterable[npt.ArrayLike], *, is_target: BoolArray | None = None) -> None:
        """Write one document, given in pieces of any length, and its end. A document without tokens is skipped.

        `is_target` is the loss mask of its tokens and its end; without one, every token is a target.
        """
        start = self._num_tokens
        for piece in pieces:
            tokens = np.asarray(piece)
            if tokens.size:
                self._append(tokens)
        if self._num_tokens == start:
            return
        self._append_data(self._eos)
        self._write(self._offsets, np.array(start, _OFFSET).tobytes())
        self._num_documents += 1
        length = self._num_tokens - start
        if is_target is not None and is_target.shape != (length,):
            raise TokenFileError(
                f"a loss mask needs one value for each token of its document and one for its end (shape "
                f"{is_target.shape}, tokens {length - 1}); give {length}"
            )
        if self._mask is not None or (is_target is not None and not is_target.all()):
            self._append_mask(start, length if is_target is None else is_target)

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
            for file in (self._offsets, self._file, *([self._mask] if self._mask else [])):
                with contextlib.suppress(OSError):
                    file.close()
            self._temporary.unlink(missing_ok=True)

    def _append(self, tokens: AnyIntArray) -> None:
        if tokens.dtype.kind not in "iu" or int(tokens.min()) < 0 or int(tokens.max()) >= self._header.vocab_size:
            raise TokenFileError(
                f"token outside the vocabulary ({tokens.dtype} from {tokens.min()} to {tokens.max()}, "
                f"vocabulary {self._header.vocab_size}); check the tokenizer"
            )
        self._append_data(tokens.astype(_DTYPES[self._header.dtype]).tobytes())

    def _append_data(self, data: bytes) -> None:
        self._write(self._file, data)
        self._update_checksums(data)
        self._num_tokens += len(data) // len(self._eos)

    def _append_mask(self, start: int, is_target: int | BoolArray) -> None:
        """Append the loss mask of a document that starts at a token; a number stands for as many targets."""
        if self._mask is None:
            try:
                self._mask = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115 - __exit__ closes it
            except OSError as error:
                raise self._cannot_write(error) from error
            self._append_mask(0, start)  # the documents before the first one with a mask
        if isinstance(is_target, int):
            for at in range(0, is_target, _CHUNK_BYTES):
                self._write(self._mask, b"\1" * min(_CHUNK_BYTES, is_target - at))
            self._num_targets += is_target
        else:
            self._write(self._mask, is_target.tobytes())
            self._num_targets += int(is_target.sum())

    def _update_checksums(self, data: bytes) -> None:
        self._digest.update(data)
        rest = memoryview(data)
        while rest:
            part, rest = rest[: BLOCK_BYTES - self._block_bytes], rest[BLOCK_BYTES - self._block_bytes :]
            self._crc32, self._block_bytes = zlib.crc32(part, self._crc32), self._block_bytes + len(part)
            if self._block_bytes == BLOCK_BYTES:
                self._end_block()

    def _end_block(self) -> None:
        self._checksums.append(self._crc32)
        self._crc32 = self._block_bytes = 0

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
        if self._mask is not None:
            if not self._num_targets:
                raise TokenFileError(f"no token is a target ({self.path}); give a document whose loss mask has one")
            header = replace(header, num_targets=self._num_targets)
        padding = bytes(header.offsets_start - self._file.tell())
        self._file.write(padding)
        self._update_checksums(padding)
        self._offsets.seek(0)
        while chunk := self._offsets.read(_CHUNK_BYTES):
            self._update_checksums(chunk)
            self._file.write(chunk)
        if self._mask is not None:
            self._finish_mask(self._mask)
        if self._block_bytes:
            self._end_block()
        checksums = np.array(self._checksums, _CHECKSUM).tobytes()
        self._file.write(checksums)
        self._file.seek(0)
        self._file.write(replace(header, sha256=self._digest.hexdigest(), blocks_crc32=zlib.crc32(checksums)).encode())
        self._file.flush()
        # Without this a crash of the node may leave an empty file under the name.
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self.path)

    def _finish_mask(self, mask: BinaryIO) -> None:
        mask.seek(0)
        while chunk := mask.read(_CHUNK_BYTES):  # a multiple of 64 tokens, but for the last one
            bits = np.packbits(np.frombuffer(chunk, np.uint8), bitorder="little").tobytes()
            bits += bytes(-len(bits) % 8)
            self._update_checksums(bits)
            self._file.write(bits)

    def _cannot_write(self, error: OSError) -> TokenFileError:
        try:
            free = f", {shutil.disk_usage(self.path.parent).free / 1e6:.0f} MB free"
        except OSError:
            free = ""
        return TokenFileError(
            f"cannot write token file ({self.path}: {error.strerror or error}{free}); choose another folder"
        )
