import json
import multiprocessing
import os
import random
import stat
import zlib
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from hostile_inputs import change_token_file

from echelon.data import TokenFile, TokenFileError, TokenWriter, is_token_file
from echelon.data.token_file import BLOCK_BYTES, HEADER_BYTES


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, "uint16"), (65536, "uint16"), (65537, "uint32"), (128256, "uint32")]
)
def test_round_trip(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    path = tmp_path / "new" / "folder" / "x.tokens"
    with TokenWriter(path, vocab_size=vocab_size, eos=vocab_size - 1, tokenizer="t") as writer:
        writer.write_document([np.array([1, 2]), np.array([3])])
        writer.write_document([])
        writer.write_document([np.array([], np.int64), np.array([vocab_size - 2])])
    file = TokenFile(path)
    file.verify()
    end = vocab_size - 1
    assert file.header.dtype == dtype
    assert file.tokens.tolist() == [1, 2, 3, end, vocab_size - 2, end]
    assert file.offsets.tolist() == [0, 4]
    assert (file.header.vocab_size, file.header.eos, file.header.tokenizer) == (vocab_size, end, "t")
    assert is_token_file(path)
    assert os.listdir(path.parent) == [path.name]
    # As readable as any other file: a cache is often shared.
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_header_can_be_read_by_a_person(write) -> None:
    raw = write([3]).path.read_bytes()[:HEADER_BYTES]
    assert json.loads(raw)["num_tokens"] == 4
    assert raw.endswith(b" \n")


def test_the_same_tokens_give_the_same_bytes(write) -> None:
    first = write([5, 9], name="a").path.read_bytes()
    assert write([5, 9], name="b").path.read_bytes() == first


def test_every_flipped_bit_is_found(write) -> None:
    path = write([20, 30, 7]).path
    good = path.read_bytes()
    header_end = good.index(b"}") + 1
    rng = np.random.default_rng(0)
    places = [*range(0, header_end, 7), *rng.integers(HEADER_BYTES, len(good), 40).tolist(), len(good) - 1]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        with pytest.raises(TokenFileError, match=r"damaged|not a token file|corrupt|another version"):
            TokenFile(path).verify()


@pytest.mark.parametrize("keep", [0, 10, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 3, -1])
def test_truncated(write, keep: int) -> None:
    path = write([50]).path
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TokenFileError, match="truncated" if keep not in (0, 10) else "not a token file"):
        TokenFile(path)


def test_bytes_after_the_end(write) -> None:
    path = write([50]).path
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(TokenFileError, match=r"has bytes after its end .*write it again"):
        TokenFile(path)


def test_a_file_of_another_version(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.data.token_file.VERSION", 3)
    with monkeypatch.context() as patch:
        file = write([3])
        patch.setattr("echelon.data.token_file.VERSION", 2)
        with pytest.raises(TokenFileError, match=r"another version .*: 3, expected 2"):
            TokenFile(file.path)


def test_foreign_and_missing_files(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("once upon a time")
    with pytest.raises(
        TokenFileError, match=r"not a token file .*a.txt: begins with b'once.*; tokenise the text first"
    ):
        TokenFile(text)
    with pytest.raises(TokenFileError, match=r"cannot be read \(no such file"):
        TokenFile(tmp_path / "none")
    assert not is_token_file(text)
    assert not is_token_file(tmp_path)
    assert not is_token_file(tmp_path / "none")


def _write(path: Path, *documents: list[int]) -> None:
    """A document without tokens stands for a failure in the middle of a write."""
    with TokenWriter(path, vocab_size=257, eos=256, tokenizer="t") as writer:
        for document in documents:
            if not document:
                raise ZeroDivisionError
            writer.write_document([np.array(document)])


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        _write(tmp_path / "x.tokens", [1], [])
    with pytest.raises(TokenFileError, match="no text to write"):
        _write(tmp_path / "x.tokens")
    for token in (-1, 257):
        with pytest.raises(TokenFileError, match="token outside the vocabulary"):
            _write(tmp_path / "x.tokens", [1], [token])
    with pytest.raises(TokenFileError, match=r"File name too long"):
        _write(tmp_path / ("x" * 250), [1])
    assert os.listdir(tmp_path) == []


def test_a_failed_write_keeps_the_old_file(write) -> None:
    file = write([5])
    with pytest.raises(ZeroDivisionError):
        _write(file.path, [1], [])
    TokenFile(file.path).verify()
    assert os.listdir(file.path.parent) == [file.path.name]


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match="eos must be a token of the vocabulary"):
        TokenWriter(tmp_path / "x", vocab_size=10, eos=10, tokenizer="t")
    with pytest.raises(TokenFileError, match="header of a token file is too long"):
        TokenWriter(tmp_path / "x", vocab_size=10, eos=9, tokenizer="t" * 5000)
    (tmp_path / "file").write_text("")
    with pytest.raises(TokenFileError, match=r"cannot write token file .*; choose another folder"):
        _write(tmp_path / "file" / "x", [1])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("num_documents", [1, 5000])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_documents: int) -> None:
    """Closing a file on a full disk fails a second time, which hid the first error and left the temporary file."""

    def open_full(path: Path, mode: str) -> BinaryIO:
        path.touch()
        return open("/dev/full", "wb")

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(TokenFileError, match=r"No space left on device.*MB free"):
        _write(tmp_path / "x", *[[1, 2, 3]] * num_documents)
    assert os.listdir(tmp_path) == []


def _write_often(path: Path, fill: int) -> None:
    for _ in range(30):
        with TokenWriter(path, vocab_size=257, eos=256, tokenizer="bytes") as writer:
            writer.write_document([np.full(1000 + fill, fill)])


def test_two_writers_and_a_reader(tmp_path: Path) -> None:
    """A reader sees one complete file or the other, never a mix and never half of one."""
    path = tmp_path / "x.tokens"
    _write_often(path, 1)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_often, args=(path, fill)) for fill in (1, 2)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        file = TokenFile(path)
        seen.add((file.header.num_tokens, int(file.tokens[0]), len(np.unique(file.tokens))))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen <= {(1002, 1, 2), (1003, 2, 2)}
    TokenFile(path).verify()
    assert os.listdir(tmp_path) == [path.name]


# -- what is checked, and when: see the note of token_file.py ---------------------------------------------------------


def _zeroed(path: Path, start: int, stop: int) -> None:
    data = bytearray(path.read_bytes())
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)


def test_a_half_zeroed_file_is_refused_when_it_is_opened(write) -> None:
    path = write([500] * 40).path
    size = path.stat().st_size
    _zeroed(path, HEADER_BYTES + 100, size // 2)
    with pytest.raises(TokenFileError, match=r"token file is corrupt .*the bytes of block 0 have changed"):
        TokenFile(path)


def test_blocks_of_a_large_file_are_checked_when_they_are_first_read(write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached file, half zeroed, trained without a word: only its header was read."""
    path = write([1000] * 200).path
    tokens = TokenFile(path).tokens.copy()
    _zeroed(path, HEADER_BYTES + 3 * BLOCK_BYTES, HEADER_BYTES + 4 * BLOCK_BYTES)
    monkeypatch.setattr("echelon.data.token_file.VERIFY_BYTES", 0)
    file, per_block = TokenFile(path), BLOCK_BYTES // 2
    assert np.array_equal(file.read(10, 3 * per_block), tokens[10 : 3 * per_block])
    assert np.array_equal(file.read(len(tokens) - 5, len(tokens) + 5), tokens[-5:])
    for start, stop in (
        (3 * per_block - 1, 3 * per_block + 1),
        (4 * per_block - 1, 4 * per_block + 9),
        (0, len(tokens)),
    ):
        with pytest.raises(TokenFileError, match="the bytes of block 3 have changed"):
            file.read(start, stop)
    data = path.read_bytes()
    for place in (len(data) - 1, file.header.offsets_start + 8):  # the table of checksums, an offset
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(TokenFileError, match="have changed"):
            TokenFile(path)


def test_wrong_values_with_right_checksums(write) -> None:
    good = write([500] * 40).path.read_bytes()
    for part, says in (("tokens", "outside of the vocabulary"), ("offsets", "offsets are not in order")):
        path = write([500] * 40).path
        change_token_file(path, part, random.Random(1))
        assert path.read_bytes() != good
        with pytest.raises(TokenFileError, match=says):
            TokenFile(path)


def test_headers_of_other_types_with_right_checksums(write) -> None:
    for name, value in (
        ("num_tokens", "4"),
        ("num_documents", 1.0),
        ("vocab_size", None),
        ("eos", True),
        ("sha256", 7),
    ):
        path = write([3]).path
        header = json.loads(path.read_bytes()[:HEADER_BYTES]) | {name: value}
        del header["crc32"]
        text = json.dumps({**header, "crc32": zlib.crc32(json.dumps(header).encode())}).encode()
        path.write_bytes(text.ljust(HEADER_BYTES - 1) + b"\n" + path.read_bytes()[HEADER_BYTES:])
        with pytest.raises(TokenFileError, match="header of a token file is damaged"):
            TokenFile(path)


def test_a_file_of_version_1_is_read_in_full(write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write([500] * 40).path
    file = TokenFile(path)
    header, tokens, data = replace(file.header, blocks_crc32=None), file.tokens.copy(), path.read_bytes()
    fields = {
        name: value for name, value in json.loads(header.encode()).items() if name not in ("crc32", "blocks_crc32")
    }
    assert fields["version"] == 1
    text = json.dumps({**fields, "crc32": zlib.crc32(json.dumps(fields).encode())}).encode()
    path.write_bytes(text.ljust(HEADER_BYTES - 1) + b"\n" + data[HEADER_BYTES : header.blocks_start])
    monkeypatch.setattr("echelon.data.token_file.VERIFY_BYTES", 0)
    assert np.array_equal(TokenFile(path).read(0, len(tokens)), tokens)
    _zeroed(path, HEADER_BYTES + 100, HEADER_BYTES + 200)
    with pytest.raises(TokenFileError, match="sha256"):
        TokenFile(path)


def test_a_fifo_is_no_token_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.tokens")
    with pytest.raises(TokenFileError, match="it is a FIFO"):
        TokenFile(tmp_path / "x.tokens")
    assert not is_token_file(tmp_path / "x.tokens")
