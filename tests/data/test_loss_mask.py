"""The loss mask of a token file: bits on disk, targets in a batch."""

import json
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echelon.data import NO_TARGET, TokenDataset, TokenFile, TokenFileError, TokenWriter
from echelon.data.token_file import BLOCK_BYTES, HEADER_BYTES, TokenFileHeader

CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
Masked = list[tuple[int, list[bool] | None]]
"""length of each document, and its mask with that of its end"""


def write_masked(path: Path, documents: Masked) -> TokenFile:
    with TokenWriter(path, vocab_size=257, eos=256, tokenizer="bytes") as writer:
        for length, mask in documents:
            is_target = None if mask is None else np.array(mask, bool)
            writer.write_document([np.arange(length) % 256], is_target=is_target)
    return TokenFile(path)


@st.composite
def masked_documents(draw: st.DrawFn) -> Masked:
    documents: Masked = []
    for length in draw(st.lists(st.integers(1, 60), min_size=1, max_size=12)):
        size = length + 1
        mask = draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size))
        documents.append((length, mask))
    return documents


@given(documents=masked_documents(), seq_len=st.integers(1, 40), mask_documents=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=CHECKS)
def test_a_target_is_left_out_exactly_where_its_own_token_is_masked(
    tmp_path: Path, documents: Masked, seq_len: int, mask_documents: bool
) -> None:
    bits = [bit for length, mask in documents for bit in (mask or [True] * (length + 1))]
    path = tmp_path / "x.tokens"
    if not any(bits):
        with pytest.raises(TokenFileError, match="no token is a target"):
            write_masked(path, documents)
        return
    file = write_masked(path, documents)
    file.verify()
    assert file.header.num_targets == (None if all(bits) else sum(bits))
    assert file.is_target(0, len(bits) + 9).tolist() == bits
    plain = write_masked(tmp_path / "plain.tokens", [(length, None) for length, _ in documents])
    assert (file.tokens == plain.tokens).all()
    masked, every = (TokenDataset([each.path], (), seq_len, 7, mask_documents=mask_documents) for each in (file, plain))
    indices = np.arange(masked.num_train)
    batch, reference, place = masked.batch(indices), every.batch(indices), every.locate(indices)
    position = place.sample[:, None] * seq_len + np.arange(seq_len) + 1
    kept = np.array([*bits, *[False] * (seq_len + 1)])[position]
    assert (batch["targets"] == np.where(kept, reference["targets"], NO_TARGET)).all()
    assert (batch["tokens"] == reference["tokens"]).all()


def test_any_range_of_the_mask_can_be_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    bits = rng.random(1001) < 0.4
    file = write_masked(tmp_path / "x", [(1000, bits.tolist())])
    for start, stop in [(0, 1001), (1, 2), (7, 9), (63, 130), (990, 2000), (5, 5), (1001, 1005)]:
        assert file.is_target(start, stop).tolist() == bits[start:stop].tolist()


def test_a_file_without_masked_tokens_has_no_mask(tmp_path: Path) -> None:
    plain = write_masked(tmp_path / "a", [(30, None), (4, None)])
    ones = write_masked(tmp_path / "b", [(30, [True] * 31), (4, None)])
    assert plain.header.num_targets is None
    assert plain.path.read_bytes() == ones.path.read_bytes()
    assert plain.is_target(3, 9).all()
    assert len(plain.is_target(3, 999)) == 36 - 3


def test_documents_before_the_first_mask_are_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.data.token_file._CHUNK_BYTES", 64)
    file = write_masked(tmp_path / "x", [(500, None), (3, [False, True, False, True]), (2, None)])
    assert file.is_target(0, 999).tolist() == [*[True] * 501, False, True, False, True, *[True] * 3]


def test_a_mask_of_another_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match=r"one value for each token .*tokens 3\); give 4"):
        write_masked(tmp_path / "x", [(3, [True, False, True])])


def test_every_flipped_bit_of_the_mask_is_found(tmp_path: Path) -> None:
    file = write_masked(tmp_path / "x", [(300, [n % 3 == 0 for n in range(301)])])
    good = file.path.read_bytes()
    for place in range(file.header.mask_start, file.header.blocks_start):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        file.path.write_bytes(bad)
        with pytest.raises(TokenFileError, match="token file is corrupt"):
            TokenFile(file.path)


def test_blocks_of_a_large_mask_are_checked_when_they_are_first_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening stays O(1): neither the tokens nor the mask are read, only the offsets between them."""
    length = 3 * 8 * BLOCK_BYTES
    bits = np.arange(length + 1) % 5 != 0
    path = tmp_path / "x"
    with TokenWriter(path, vocab_size=257, eos=256, tokenizer="bytes") as writer:
        writer.write_document([np.zeros(length, np.int64)], is_target=bits)
    header = TokenFile(path).header
    block = (header.mask_start - HEADER_BYTES) // BLOCK_BYTES + 2
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + block * BLOCK_BYTES + 100] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr("echelon.data.token_file.VERIFY_BYTES", 0)
    checked: list[tuple[int, int]] = []
    check = TokenFile._check_blocks

    def record(self: TokenFile, first: int, last: int) -> None:
        checked.append((first, last))
        check(self, first, last)

    monkeypatch.setattr(TokenFile, "_check_blocks", record)
    file = TokenFile(path)
    offsets_block = (header.offsets_start - HEADER_BYTES) // BLOCK_BYTES
    assert checked == [(offsets_block, offsets_block + 1)]
    assert (file.is_target(10, 5000) == bits[10:5000]).all()
    start = (block * BLOCK_BYTES + HEADER_BYTES - header.mask_start) * 8
    assert (file.is_target(start - 100, start) == bits[start - 100 : start]).all()
    with pytest.raises(TokenFileError, match=f"the bytes of block {block} have changed"):
        file.is_target(start - 1, start + 1)


def test_a_file_of_version_2_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the same bytes but for its header, and no mask."""
    path = write_masked(tmp_path / "x", [(300, None)]).path
    header = TokenFile(path).header
    data = path.read_bytes()
    path.write_bytes(header_bytes(header, version=2, without="num_targets") + data[HEADER_BYTES:])
    file = TokenFile(path)
    assert (file.header, file.tokens.tolist()) == (header, TokenFile(path).tokens.tolist())
    assert file.is_target(0, 9).all()
    for number, version in ((5, 2), (0, 3), (302, 3), (1.0, 3), ("3", 3)):
        path.write_bytes(header_bytes(replace(header, num_targets=number), version=version) + data[HEADER_BYTES:])
        with pytest.raises(TokenFileError, match="header of a token file is damaged"):
            TokenFile(path)


def header_bytes(header: TokenFileHeader, *, version: int, without: str = "") -> bytes:
    """The header with a right checksum."""
    fields = {"magic": "echelon-tokens", "version": version, **asdict(header)}
    fields.pop(without, None)
    text = json.dumps({**fields, "crc32": zlib.crc32(json.dumps(fields).encode())}).encode()
    return text.ljust(HEADER_BYTES - 1) + b"\n"


def test_masks_change_the_fingerprint_and_are_described(tmp_path: Path) -> None:
    masks = [None, [True, False, True, True], [True, True, False, True]]
    files = [write_masked(tmp_path / str(n), [(3, mask), (9, None)]) for n, mask in enumerate(masks)]
    data = [TokenDataset([file.path], (), 4, 0) for file in files]
    assert len({each.fingerprint for each in data}) == 3
    assert ("targets", "13 of 14 tokens", "the loss mask leaves out the others") in data[1].describe()
    assert [name for name, _, _ in data[0].describe()] == ["data", "samples", "data fingerprint"]
