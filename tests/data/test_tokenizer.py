import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echelon.data import ByteTokenizer, JsonTokenizer, TokenizerError, load_tokenizer

TEXT = "naïve café, 東京 🙂\r\nline two\n\n  indented <|endoftext|> end\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A byte-level BPE tokenizer, trained here, with the traps of real files: truncation, padding and a template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator([TEXT, "the cat sat on the mat\n" * 10], trainer)
    engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    engine.enable_truncation(4)
    engine.enable_padding(length=8)
    path = tmp_path / "tokenizer.json"
    engine.save(str(path))
    return path


def stream(tokenizer: Any, data: bytes) -> list[int]:
    return [int(token) for piece in tokenizer.stream(io.BytesIO(data)) for token in piece]


def test_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert isinstance(tokenizer, ByteTokenizer)
    assert (tokenizer.vocab_size, tokenizer.eos) == (257, 256)
    assert stream(tokenizer, TEXT.encode()) == tokenizer.encode(TEXT) == list(TEXT.encode())
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    # A model's output may hold half a character or the end of a document.
    assert tokenizer.decode([0xF0, 0x9F, 256, 65]) == "\ufffdA"
    assert stream(tokenizer, bytes(range(256))) == list(range(256))


def test_json_keeps_every_token_and_adds_none(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT
    assert tokenizer.eos not in tokens
    assert 1 not in tokens
    assert len(tokens) > 8
    assert max(tokens) < tokenizer.vocab_size == 300
    assert stream(tokenizer, TEXT.encode()) == tokens
    assert load_tokenizer(path.parent).name == tokenizer.name


def test_json_streams_in_pieces_that_end_with_a_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(path)
    for size in (1, 3, 7, 64):
        monkeypatch.setattr("echelon.data.tokenizer._READ_BYTES", size)
        pieces = list(tokenizer.stream(io.BytesIO(TEXT.encode() * 5)))
        assert len(pieces) > 1
        assert tokenizer.decode([int(token) for piece in pieces for token in piece]) == TEXT * 5
    assert all(tokenizer.decode(piece.tolist()).endswith("\n") for piece in pieces)


@pytest.mark.parametrize("size", [2, 5, 1 << 22])
def test_text_that_is_not_utf8(path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("echelon.data.tokenizer._READ_BYTES", size)
    for data, place in ((b"abcd\xffefgh", 4), (b"abcde\xe6\x9d", 5)):
        with pytest.raises(TokenizerError, match=rf"not UTF-8 \(input: .* at byte {place}\); convert it"):
            stream(load_tokenizer(path), data)


def test_the_name_distinguishes_vocabularies(path: Path) -> None:
    before = load_tokenizer(path).name
    path.write_text(path.read_text().replace('"<s>"', '"<t>"'))
    assert load_tokenizer(path).name != before
    assert before.startswith("tokenizer.json@")


def test_which_token_ends_a_document(path: Path) -> None:
    assert load_tokenizer(path).eos == 0
    assert load_tokenizer(path, eos="<s>").eos == 1
    config = path.with_name("tokenizer_config.json")
    for content in ("<s>", {"content": "<s>"}):
        config.write_text(json.dumps({"eos_token": content}))
        assert load_tokenizer(path).eos == 1
    for content in ("null", "[]", "{broken", '{"eos_token": 3}'):
        config.write_text(content)
        assert load_tokenizer(path).eos == 0
    with pytest.raises(TokenizerError, match=r"no token ends a document .*none of <nope> .*pass eos="):
        load_tokenizer(path, eos="<nope>")


def test_the_end_token_of_a_hugging_face_directory(path: Path) -> None:
    """tokenizer_config.json counts before generation_config.json, whose ids may be several, unknown or nonsense."""
    generation = path.with_name("generation_config.json")
    for ids, eos in ((1, 1), ([1, 0], 1), ([9999, 1], 1), (9999, 0), (None, 0), ([True, "1", -1, 2**40], 0), ("x", 0)):
        generation.write_text(json.dumps({"eos_token_id": ids}))
        assert load_tokenizer(path.parent).eos == eos, ids
    generation.write_text(json.dumps({"eos_token_id": 1}))
    path.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert load_tokenizer(path.parent).eos == 0
    path.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": "<gone>"}))
    assert load_tokenizer(path.parent).eos == 1


def test_ids_may_have_holes(path: Path) -> None:
    content = json.loads(path.read_text())
    content["model"]["vocab"]["far"] = 70_000
    path.write_text(json.dumps(content))
    assert load_tokenizer(path).vocab_size == 70_001


def test_not_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r'no such tokenizer .*give "bytes", a tokenizer.json'):
        load_tokenizer("byte")
    for content in (b"", b"{}", b"\xff\xfe"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(TokenizerError, match="not a tokenizer file"):
            load_tokenizer(tmp_path)


def test_without_the_package(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizerError, match=r'pip install "echelon\[tokenizers\]"'):
        JsonTokenizer(path)
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)


def test_piece_dtype_needs_no_copy_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.data.tokenizer._READ_BYTES", 4)
    pieces = list(ByteTokenizer().stream(io.BytesIO(b"abcdefghij")))
    assert [len(piece) for piece in pieces] == [4, 4, 2]
    assert all(piece.dtype == np.uint8 for piece in pieces)
    assert sum(len(piece) for piece in pieces) == 10
