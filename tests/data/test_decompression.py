import bz2
import gzip
import lzma
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echelon.data import TextError, TokenFile, text_files, tokenize
from echelon.data.decompression import MAX_READ, DecompressedFile, TextInput
from echelon.input_file import InputFileError

zstandard = pytest.importorskip("zstandard")
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": partial(lzma.compress, preset=1),
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
TEXT = b"".join(b"line %d of a text, " % n for n in range(3000))

suffixes = pytest.mark.parametrize("suffix", COMPRESS)


def read(path: Path, size: int = -1, max_bytes: int | None = None) -> bytes:
    with TextInput(path, max_bytes=max_bytes) as file:
        data = b"".join(iter(lambda: file.text.read(size), b""))
        assert file.position == path.stat().st_size
        return data


@suffixes
@given(parts=st.lists(st.binary(max_size=3000), min_size=1, max_size=4), size=st.integers(1, 5000))
@settings(max_examples=15, deadline=None, suppress_health_check=CHECKS)
def test_any_bytes_in_any_number_of_streams(tmp_path: Path, suffix: str, parts: list[bytes], size: int) -> None:
    """Parallel compressors write one stream after another into a file."""
    path = tmp_path / f"x.txt{suffix}"
    path.write_bytes(b"".join(map(COMPRESS[suffix], parts)))
    assert read(path, size) == b"".join(parts)
    assert read(path) == b"".join(parts)


@suffixes
def test_every_truncation_is_found(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.txt{suffix}"
    data = COMPRESS[suffix](TEXT)
    for end in [*range(9), *range(9, len(data), len(data) // 50), len(data) - 1]:
        path.write_bytes(data[:end])
        with pytest.raises(InputFileError, match=r"is truncated \(its .* data has no end\)|is not compressed with"):
            read(path)
    path.write_bytes(data + data[:-1])
    with pytest.raises(InputFileError, match="is truncated"):
        read(path)


@suffixes
def test_flipped_bits_are_found_or_harmless(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.txt{suffix}"
    data = COMPRESS[suffix](TEXT)
    faults = 0
    for place in range(0, len(data), max(1, len(data) // 100)):
        bad = bytearray(data)
        bad[place] ^= 1 << place % 8
        path.write_bytes(bad)
        try:
            assert read(path) == TEXT  # the time in a header of gzip
        except InputFileError as error:
            assert "\n" not in str(error)  # noqa: PT017 - either is right
            faults += 1
    assert faults > 80


@suffixes
def test_bytes_after_the_end_and_padding(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](TEXT) + bytes(512))
    assert read(path) == TEXT
    path.write_bytes(COMPRESS[suffix](TEXT) + b"more")
    with pytest.raises(InputFileError, match=r"has bytes after its .* data"):
        read(path)


@suffixes
def test_the_name_says_what_a_file_is(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.txt{suffix}"
    for content in (b"text", b"", COMPRESS[".gz" if suffix != ".gz" else ".xz"](TEXT)):
        path.write_bytes(content)
        with pytest.raises(InputFileError, match=r"is not compressed with .* \(it begins with b"):
            read(path)
    plain = tmp_path / "x.txt"
    plain.write_bytes(COMPRESS[suffix](TEXT))
    if suffix == ".bz2":
        return  # its magic is text: "BZh"
    with pytest.raises(InputFileError, match=rf"is compressed with .*; name it x\.txt\{suffix}"):
        read(plain)


@suffixes
def test_a_bomb_is_decompressed_piece_by_piece_up_to_the_limit(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"x.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](b"a" * 20_000_000))
    longest = 0
    decompress = DecompressedFile._decompress

    def record(self: DecompressedFile, max_length: int) -> bytes:
        nonlocal longest
        data = decompress(self, max_length)
        longest = max(longest, len(data))
        return data

    monkeypatch.setattr(DecompressedFile, "_decompress", record)
    with pytest.raises(InputFileError, match=r"too large for one document \(more than 1 MiB without compression\)"):
        read(path, 1 << 16, max_bytes=1 << 20)
    # A kilobyte of Zstandard is decompressed as a whole; the others stop where they are asked to.
    assert 0 < longest <= (33 << 20 if suffix == ".zst" else MAX_READ)
    monkeypatch.setattr(sys.modules["echelon.data.tokenize"], "MAX_DOCUMENT_BYTES", 1 << 20)
    with pytest.raises(TextError, match=r"x.txt.* is too large for one document .*divide it; check data.path"):
        tokenize([path], tmp_path / "x.tokens")
    assert not (tmp_path / "x.tokens").exists()


def test_a_decoder_that_asks_for_gigabytes_is_refused(tmp_path: Path) -> None:
    data = bytearray(lzma.compress(TEXT))
    size = (data[12] + 1) * 4  # of the header of the first block, with its checksum
    assert data[14:16] == b"\x21\x01", "LZMA2 with one byte of properties"
    data[16] = 36  # a dictionary of 1 GiB
    data[12 + size - 4 : 12 + size] = zlib.crc32(data[12 : 12 + size - 4]).to_bytes(4, "little")
    (tmp_path / "x.xz").write_bytes(data)
    with pytest.raises(InputFileError, match=r"is not valid xz data \(Memory usage limit exceeded\)"):
        read(tmp_path / "x.xz")
    window = 18 << 3  # of 2^(10 + 18) bytes
    (tmp_path / "x.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([window]) + b"\x01\x00\x00")
    with pytest.raises(InputFileError, match=r"is not valid Zstandard data .*memory"):
        read(tmp_path / "x.zst")


def test_text_compressed_or_not_gives_the_same_tokens(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(TEXT)
    expected = tokenize([tmp_path / "x.txt"], tmp_path / "plain.tokens").path.read_bytes()
    for suffix, compress in COMPRESS.items():
        path = tmp_path / f"x.TXT{suffix.upper()}"
        path.write_bytes(compress(TEXT))
        calls: list[tuple[int, int]] = []
        tokenize([path], tmp_path / "x.tokens", progress=lambda *call: calls.append(call))  # noqa: B023
        assert (tmp_path / "x.tokens").read_bytes() == expected
        assert calls[-1] == (path.stat().st_size,) * 2, "progress counts bytes on disk"


def test_directories_find_compressed_files(tmp_path: Path) -> None:
    names = ["a.txt.gz", "b.jsonl", "c.jsonl.zst", "d.parquet", "e.md.XZ", "f.ndjson.bz2", "g.json-lines"]
    for name in (*names, "h.parquet.gz", "i.gz", "j.tar.gz", "k.json", "l.bin"):
        (tmp_path / name).touch()
    assert [path.name for path in text_files([tmp_path])] == names


def test_a_binary_file_that_is_compressed_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "x.txt.gz"
    path.write_bytes(gzip.compress(b"a" * 60_000 + b"\0" + TEXT))
    with pytest.raises(TextError, match="it has NUL bytes"):
        tokenize([path], tmp_path / "x.tokens")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.txt.zst"
    path.write_bytes(COMPRESS[".zst"](TEXT))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(
        TextError, match=r'x.txt.zst needs the zstandard package; run pip install "echelon\[data\]"; check'
    ):
        tokenize([path], tmp_path / "x.tokens")
    (tmp_path / "y.txt.gz").write_bytes(gzip.compress(TEXT))
    assert isinstance(tokenize([tmp_path / "y.txt.gz"], tmp_path / "x.tokens"), TokenFile)
