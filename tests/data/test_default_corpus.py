import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.data import ByteTokenizer, TextError, TokenFile, TokenFileError, default_corpus, prepare_token_file
from echelon.data.default_corpus import stdlib_files


def test_the_default_corpus_is_real_text(tmp_path: Path) -> None:
    path = default_corpus(tmp_path, max_bytes=200_000)
    file = TokenFile(path)
    file.verify()
    text = ByteTokenizer().decode(file.tokens.tolist())
    assert 150_000 < len(file.tokens) - file.header.num_documents <= 200_000
    assert text.count("def ") > 50
    # The second call finds it in the cache.
    before = path.stat().st_mtime_ns
    assert default_corpus(tmp_path, max_bytes=200_000) == path
    assert path.stat().st_mtime_ns == before
    assert default_corpus(tmp_path, max_bytes=100_000) != path


def test_the_library_without_packages_and_tests() -> None:
    files = stdlib_files()
    assert 4_000_000 < sum(file.stat().st_size for file in files) <= 8_000_000
    assert not [file for file in files if {"site-packages", "test", "tests"}.intersection(file.parts)]


def test_a_library_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(TextError, match=r"no default corpus .*; set data.path"):
        default_corpus(tmp_path)


def _make(folder: Path) -> None:
    default_corpus(folder, max_bytes=300_000)


def test_two_processes_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    makers = [context.Process(target=_make, args=(tmp_path,)) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
        assert maker.exitcode == 0
    (name,) = os.listdir(tmp_path)
    TokenFile(tmp_path / name).verify()


def test_a_corrupt_cache_is_rewritten(tmp_path: Path) -> None:
    path = default_corpus(tmp_path, max_bytes=100_000)
    good = path.read_bytes()
    path.write_bytes(good[:5000])
    assert default_corpus(tmp_path, max_bytes=100_000).read_bytes() == good


def test_prepare(tmp_path: Path) -> None:
    text, cache = tmp_path / "book.txt", tmp_path / "cache"
    text.write_text("one")
    first = prepare_token_file(text, cache, tokenizer=ByteTokenizer())
    assert first.name.startswith("book-")
    assert first.parent == cache
    assert prepare_token_file(text, cache, tokenizer=ByteTokenizer()) == first
    text.write_text("one two")
    assert prepare_token_file(text, cache, tokenizer=ByteTokenizer()) != first
    # A token file is used as it is, but must come from the same tokenizer.
    assert prepare_token_file(first, cache, tokenizer=ByteTokenizer()) == first
    other = ByteTokenizer()
    other.name = "other"
    with pytest.raises(TokenFileError, match=r"written with another tokenizer .*bytes, data.tokenizer: other"):
        prepare_token_file(first, cache, tokenizer=other)


def test_the_package_imports_no_torch() -> None:
    code = "import sys, echelon.data; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
