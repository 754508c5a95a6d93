import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from echelon.data import ByteTokenizer, TextError, TokenFile, TokenFileError, prepare_token_file, text_files, tokenize


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    for name, text in {
        "b.txt": "second",
        "a/z.md": "first",
        "a-c.txt": "between",
        "empty.txt": "",
        "picture.png": "no",
        ".hidden.txt": "no",
        ".git/config.txt": "no",
        "c/UPPER.TXT": "third",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder


def documents(output: Path) -> list[str]:
    file = TokenFile(output)
    file.verify()
    ends = [*file.offsets[1:].tolist(), len(file.tokens)]
    assert all(file.tokens[end - 1] == file.header.eos for end in ends)
    return [ByteTokenizer().decode(file.tokens[a:b].tolist()) for a, b in zip(file.offsets, ends, strict=True)]


def test_a_folder(folder: Path, tmp_path: Path) -> None:
    tokenize([folder], tmp_path / "x.tokens")
    assert documents(tmp_path / "x.tokens") == ["first", "between", "second", "third"]


def test_files_in_the_order_given_and_each_once(folder: Path, tmp_path: Path) -> None:
    tokenize([folder / "picture.png", folder / "b.txt", folder, folder / "a" / ".." / "b.txt"], tmp_path / "x.tokens")
    assert documents(tmp_path / "x.tokens") == ["no", "second", "first", "between", "third"]


def test_progress(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.data.tokenizer._READ_BYTES", 3)
    calls: list[tuple[int, int]] = []
    tokenize([folder], tmp_path / "x.tokens", progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1] == (23, 23)
    assert calls[0] == (3, 23)


def test_unreadable_paths(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"no such file or directory .*nothing.*; check data.path"):
        text_files([folder / "nothing"])
    (tmp_path / "bare").mkdir()
    with pytest.raises(TextError, match="no text in the directory"):
        text_files([tmp_path / "bare"])


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_without_permission(folder: Path, tmp_path: Path) -> None:
    (folder / "b.txt").chmod(0)
    with pytest.raises(TextError, match=r"cannot read text .*b.txt: Permission denied"):
        tokenize([folder], tmp_path / "x.tokens")


def test_a_disk_that_fails_while_reading_is_not_blamed_on_the_output(folder: Path, tmp_path: Path) -> None:
    class Failing(ByteTokenizer):
        def stream(self, file: BinaryIO) -> Iterator[np.ndarray]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
            yield

    with pytest.raises(TextError, match=r"z.md cannot be read .input/output error"):
        tokenize([folder], tmp_path / "x.tokens", tokenizer=Failing())
    assert os.listdir(tmp_path) == ["text"]


def test_a_broken_link_is_no_file(folder: Path) -> None:
    (folder / "link.txt").symlink_to(folder / "gone.txt")
    (folder / "loop").symlink_to(folder)
    assert [path.name for path in text_files([folder])] == ["z.md", "a-c.txt", "b.txt", "UPPER.TXT", "empty.txt"]


def test_a_binary_file_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"text\0text")
    with pytest.raises(TextError, match=r"not a text file \(.*x.txt: it has NUL bytes\)"):
        tokenize([tmp_path / "x.txt"], tmp_path / "x.tokens")
    assert not (tmp_path / "x.tokens").exists()


def test_a_token_file_is_verified_before_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("text")
    tokenize([tmp_path / "x.txt"], tmp_path / "x.tokens")
    assert prepare_token_file(tmp_path / "x.tokens", tmp_path, tokenizer=ByteTokenizer()) == tmp_path / "x.tokens"
    damaged = bytearray((tmp_path / "x.tokens").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "x.tokens").write_bytes(damaged)
    with pytest.raises(TokenFileError, match="token file is corrupt"):
        prepare_token_file(tmp_path / "x.tokens", tmp_path, tokenizer=ByteTokenizer())
    (tmp_path / "x.tokens").write_bytes(b"text")
    with pytest.raises(TokenFileError, match="not a token file"):
        prepare_token_file(tmp_path / "x.tokens", tmp_path, tokenizer=ByteTokenizer())


def test_the_cache_keeps_the_tokens_of_each_tokenizer_apart(tmp_path: Path) -> None:
    class Other(ByteTokenizer):
        name = "other"

    (tmp_path / "x.txt").write_text("text")
    paths = [
        prepare_token_file(tmp_path / "x.txt", tmp_path / "cache", tokenizer=tokenizer)
        for tokenizer in (ByteTokenizer(), Other(), ByteTokenizer())
    ]
    assert [TokenFile(path).header.tokenizer for path in paths] == ["bytes", "other", "bytes"]
    assert paths[0] == paths[2]
