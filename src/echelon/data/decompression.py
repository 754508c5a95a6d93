"""Text files, compressed or not, as streams of bytes: gzip, bzip2, xz and Zstandard by the suffix of the name.

[Note: what a compressed file can do]

    a kilobyte of input, a gigabyte of output      at most `MAX_READ` bytes are decompressed ahead of the reader
    a text without an end                          a limit for one document: `max_bytes`
    a dictionary or window of gigabytes            a limit for the decoder: `MAX_DECODER_BYTES`
    an end in the middle, bytes after the end,
    the bytes of another format                    one sentence
"""

import bz2
import importlib.util
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, cast

from echelon.input_file import MIB, InputFileError, open_input

MAX_DECODER_BYTES = 128 * MIB
MAX_READ = 1 << 18
"""bytes to decompress at once"""
DATA_EXTRA = 'run pip install "echelon[data]"'


class _Decoder(Protocol):
    """One compressed stream, as in `bz2.BZ2Decompressor`."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _GzipDecoder:
    """`zlib.decompressobj` with the interface of the other decoders."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def needs_input(self) -> bool:
        return not self._stream.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail + data, max_length)


class _ZstdDecoder:
    """The `zstandard` package with the interface of the other decoders; it limits its input and not its output."""

    needs_input = True

    def __init__(self) -> None:
        import zstandard

        # Small buffers: the decoder allocates one for each call.
        decoder = zstandard.ZstdDecompressor(max_window_size=MAX_DECODER_BYTES)
        self._stream = decoder.decompressobj(write_size=1 << 15, read_across_frames=False)

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._stream.decompress(data)


class Compression(NamedTuple):
    """A compressed format."""

    name: str
    magic: bytes
    new_decoder: Callable[[], _Decoder]
    input_bytes: int = 1 << 16
    """bytes of the file for one call of the decoder"""


COMPRESSIONS = {
    ".gz": Compression("gzip", b"\x1f\x8b", _GzipDecoder),
    ".bz2": Compression("bzip2", b"BZh", bz2.BZ2Decompressor),
    ".xz": Compression("xz", b"\xfd7zXZ\0", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_DECODER_BYTES)),
    # 4 bytes of input are at most a block of 128 KiB.
    ".zst": Compression("Zstandard", b"\x28\xb5\x2f\xfd", _ZstdDecoder, input_bytes=1 << 10),
}


def compression_of(path: Path) -> Compression | None:
    return COMPRESSIONS.get(path.suffix.lower())


def missing_decoder(path: Path) -> str:
    """Return what this file needs and is not installed, as the end of a sentence; empty if nothing is."""
    if path.suffix.lower() == ".zst" and importlib.util.find_spec("zstandard") is None:
        return f"needs the zstandard package; {DATA_EXTRA}"
    return ""


class TextInput:
    """An open text file: its bytes without compression, and the position in the file itself."""

    def __init__(self, path: Path, *, max_bytes: int | None = None) -> None:
        """`max_bytes` limits what a compressed file may hold; another file has its size on disk."""
        if missing := missing_decoder(path):
            raise InputFileError(path, missing)
        self._file = file = open_input(path)
        compression = compression_of(path)
        try:
            start = file.read(8)
            file.seek(0)
            if compression is None:
                self._refuse_compressed(start, path)
        except BaseException:
            file.close()
            raise
        self._reader: io.BufferedReader | None = None
        if compression is not None:
            decompressed = DecompressedFile(file, path, compression, max_bytes)
            self._reader = io.BufferedReader(decompressed, buffer_size=MAX_READ)
        # cast: a reader of another reader has all methods of a file but `mode`.
        self.text = file if self._reader is None else cast(BinaryIO, self._reader)

    def __enter__(self) -> "TextInput":
        return self

    def __exit__(self, *_: object) -> None:
        self.text.close()
        self._file.close()

    def _refuse_compressed(self, start: bytes, path: Path) -> None:
        for suffix, known in COMPRESSIONS.items():
            if start.startswith(known.magic) and not known.magic.isascii():  # a text may begin with BZh
                raise InputFileError(path, f"is compressed with {known.name}; name it {path.name}{suffix}")

    def start(self, num_bytes: int) -> bytes:
        """The first bytes of the text, before anything is read."""
        if self._reader is not None:
            return self._reader.peek(num_bytes)[:num_bytes]
        start = self._file.read(num_bytes)
        self._file.seek(0)
        return start

    @property
    def position(self) -> int:
        """Bytes of the file that are read, of its size on disk."""
        return self._file.tell()


class DecompressedFile(io.RawIOBase):
    """The content of a compressed file; see [Note: what a compressed file can do]."""

    def __init__(self, file: BinaryIO, path: Path, compression: Compression, max_bytes: int | None) -> None:
        self._file, self._path, self._compression = file, path, compression
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._decoder: _Decoder | None = None
        self._num_streams = 0
        self._input, self._output = b"", memoryview(b"")
        """bytes of the file that no decoder has taken, and bytes of the content that no reader has taken"""
        self.name = str(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview | bytearray") -> int:  # type: ignore[override]
        """Fill the buffer: only the last read is short."""
        view, filled = memoryview(buffer).cast("B"), 0
        while filled < len(view):
            if not self._output:
                self._output = memoryview(self._decompress(len(view) - filled))
            if not self._output:
                break
            part, self._output = self._output[: len(view) - filled], self._output[len(view) - filled :]
            view[filled : filled + len(part)] = part
            filled += len(part)
        self._num_bytes += filled
        if self._max_bytes is not None and self._num_bytes > self._max_bytes:
            reason = f"is too large for one document (more than {self._max_bytes / MIB:g} MiB without compression)"
            raise InputFileError(self._path, f"{reason}; divide it")
        return filled

    def _decompress(self, max_length: int) -> bytes:
        """Return some bytes of the content, or none at its end."""
        while True:
            if self._decoder is None and not self._start_stream():
                return b""
            assert self._decoder is not None
            data = b""
            if self._decoder.needs_input:
                data, self._input = self._input or self._file.read(self._compression.input_bytes), b""
                if not data:
                    raise InputFileError(self._path, f"is truncated (its {self._compression.name} data has no end)")
            try:
                output = self._decoder.decompress(data, max_length)
            except Exception as error:  # each decoder raises its own class for the bytes that it cannot read
                reason = f"is not valid {self._compression.name} data ({error})"
                raise InputFileError(self._path, reason) from error
            if self._decoder.eof:
                self._input, self._decoder = self._decoder.unused_data + self._input, None
            if output:
                return output

    def _start_stream(self) -> bool:
        """Start the next compressed stream of the file, if it has one: parallel compressors write several."""
        compression, is_first = self._compression, self._num_streams == 0
        while True:
            if not is_first:
                self._input = self._input.lstrip(b"\0")  # padding, of blocks on a tape
            if len(self._input) >= len(compression.magic) or not (data := self._file.read(compression.input_bytes)):
                break
            self._input += data
        if not self._input and not is_first:
            return False
        if not self._input.startswith(compression.magic):
            what = f"is not compressed with {compression.name} (it begins with {self._input[:8]!r})"
            raise InputFileError(self._path, what if is_first else f"has bytes after its {compression.name} data")
        self._decoder, self._num_streams = compression.new_decoder(), self._num_streams + 1
        return True
