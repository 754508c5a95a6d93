"""Tokenizers: bytes, and the JSON files of Hugging Face `tokenizers`.

A tokenizer converts a document to tokens in pieces, so that a document may be larger than memory.
"""

import codecs
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from echelon.data.token_file import AnyIntArray, AnyPath, IntArray
from echelon.input_file import MIB, InputFileError, read_bytes, read_json

_READ_BYTES = 1 << 22
MAX_TOKENIZER_BYTES = 512 * MIB
# Tried in this order when the tokenizer's configuration names no end-of-document token.
_COMMON_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded, or a text that it cannot read."""


class TokenSpans(NamedTuple):
    """Tokens of a text, each with the characters that it stands for."""

    tokens: IntArray
    starts: IntArray
    ends: IntArray


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    @property
    def name(self) -> str:
        """Stored in token files; tokenizers with equal names produce the same tokens."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos(self) -> int:
        """The token that ends a document; `encode` and `stream` never add it themselves."""
        ...

    @property
    def special_tokens(self) -> frozenset[str]:
        """Texts that become one token each where special tokens are looked for."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_spans(self, text: str, *, special: bool) -> TokenSpans:
        """Tokens with their characters. With `special`, text that looks like a special token becomes it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def stream(self, file: BinaryIO) -> Iterator[AnyIntArray]:
        """The tokens of one document, in pieces."""
        ...


class ByteTokenizer:
    """One token per byte, and token 256 for the end of a document."""

    name = "bytes"
    vocab_size = 257
    eos = 256
    special_tokens: frozenset[str] = frozenset()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_spans(self, text: str, *, special: bool) -> TokenSpans:
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        starts = np.cumsum((tokens & 0xC0) != 0x80) - 1  # all other bytes begin a character
        return TokenSpans(tokens, starts, starts + 1)

    def decode(self, tokens: Iterable[int]) -> str:
        # A model may generate half a character, or the end of a document: neither is an error.
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def stream(self, file: BinaryIO) -> Iterator[AnyIntArray]:
        while piece := file.read(_READ_BYTES):
            yield np.frombuffer(piece, np.uint8)


class JsonTokenizer:
    """A `tokenizer.json` of Hugging Face `tokenizers`.

    Text that looks like a special token stays text: only the end of a document becomes `eos`. Truncation and padding
    that the file asks for are switched off, since a document must keep every token. A document above 4 MiB is encoded
    in pieces that end with a line.
    """

    def __init__(self, path: Path, *, eos: str | None = None) -> None:
        try:
            raw = read_bytes(path, max_bytes=MAX_TOKENIZER_BYTES)
        except InputFileError as error:
            raise TokenizerError(f"the tokenizer {error}; check data.tokenizer") from error
        try:
            from tokenizers import Tokenizer as Engine
        except ImportError as error:
            raise TokenizerError(
                f"a tokenizer file needs the `tokenizers` package ({path}: {error}); "
                'run pip install "echelon[tokenizers]", or use data.tokenizer = "bytes"'
            ) from error
        try:
            self._engine = Engine.from_str(raw.decode())
        except Exception as error:  # the engine raises bare Exception for whatever is wrong with the JSON
            raise TokenizerError(f"not a tokenizer file ({path}: {error}); give a tokenizer.json") from error
        self._engine.no_truncation()
        self._engine.no_padding()
        self._engine.encode_special_tokens = True
        # The file name alone does not distinguish two vocabularies.
        self.name = f"{path.name}@{hashlib.sha256(raw).hexdigest()[:12]}"
        vocabulary: dict[str, int] = self._engine.get_vocab(with_added_tokens=True)
        # Not their number: ids may have holes.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        added = self._engine.get_added_tokens_decoder().values()
        self.special_tokens = frozenset(token.content for token in added if token.special)
        candidates = [eos] if eos is not None else [*_configured_eos(path, self._engine.id_to_token), *_COMMON_EOS]
        known = [token for token in candidates if token in vocabulary]
        if not known:
            raise TokenizerError(
                f"no token ends a document ({path}: none of {', '.join(candidates)} is in the vocabulary); "
                "name one as eos_token in a tokenizer_config.json in the same directory, or pass eos="
            )
        self.eos = vocabulary[known[0]]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids

    def encode_spans(self, text: str, *, special: bool) -> TokenSpans:
        self._engine.encode_special_tokens = not special
        try:
            encoding = self._engine.encode(text, add_special_tokens=False)
        finally:
            self._engine.encode_special_tokens = True
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return TokenSpans(np.array(encoding.ids, np.int64), spans[:, 0], spans[:, 1])

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._engine.decode(list(tokens), skip_special_tokens=True)
        return text

    def stream(self, file: BinaryIO) -> Iterator[AnyIntArray]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        pending, position, last = "", 0, False
        while not last:
            raw = file.read(_READ_BYTES)
            last = not raw
            try:
                pending += decoder.decode(raw, final=last)
            except UnicodeDecodeError as error:
                # The decoder's own buffer may begin before this read.
                bad = position + len(raw) - len(error.object) + error.start
                raise TokenizerError(
                    f"text is not UTF-8 ({getattr(file, 'name', 'input')}: {error.reason} at byte {bad}); "
                    'convert it, or use data.tokenizer = "bytes"'
                ) from error
            position += len(raw)
            if not last and len(pending) < _READ_BYTES:
                continue
            cut = len(pending) if last else pending.rfind("\n") + 1 or len(pending)
            piece, pending = pending[:cut], pending[cut:]
            if piece:
                yield np.array(self.encode(piece), np.int64)


def load_tokenizer(spec: AnyPath, *, eos: str | None = None) -> Tokenizer:
    """`"bytes"`, a `tokenizer.json`, or a folder that holds one. `eos` names the token that ends a document."""
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not os.path.isfile(path):  # False also for a name that is too long
        raise TokenizerError(f'no such tokenizer ({spec}); give "bytes", a tokenizer.json or a folder that holds one')
    return JsonTokenizer(path, eos=eos)


def _configured_eos(path: Path, id_to_token: Callable[[int], str | None]) -> list[str]:
    """The end token that Hugging Face's files beside a tokenizer name, in the order in which they count.

    tokenizer_config.json has a text, or an object with a `content`; generation_config.json has an id, or several.
    """
    tokens: list[Any] = []
    for name, key in (("tokenizer_config.json", "eos_token"), ("generation_config.json", "eos_token_id")):
        try:
            config: Any = read_json(path.with_name(name))
        except InputFileError:
            continue
        value = config.get(key) if isinstance(config, dict) else None
        if key == "eos_token":
            tokens.append(value.get("content") if isinstance(value, dict) else value)
        else:
            ids = value if isinstance(value, list) else [value]
            tokens += [id_to_token(number) for number in ids if type(number) is int and 0 <= number < 1 << 32]
    return [token for token in tokens if isinstance(token, str)]
