"""Tokens and loss mask of a conversation: only what the assistant says is a target.

    text        <|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\nHi!<|im_end|>\\n
                                                                        └──── turn ────┘
    tokens      150 882 198 9906 151 198 150 78191 198                  13347 0 151 198      eos
    is_target    0   0   0   0    0   0   0    0    0                     1   1  1   1        1

The conversation is tokenized as one text, as by transformers, and a token is a target where one of its characters is of
a turn of the assistant. The end of the document is one where the last message is the assistant's. A template that ends
with that token itself gets no second one.

A message cannot end its own turn: where it spells a special token of the tokenizer, it is marked before the template
sees it, and that part is tokenized as plain text.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from echelon.data.chat_template import ChatRenderer
from echelon.data.file_format import TextError
from echelon.data.records import ASSISTANT, ChatRecord
from echelon.data.template_worker import split_at_marks, unused_marks
from echelon.data.token_file import BoolArray, IntArray
from echelon.data.tokenizer import Tokenizer, TokenSpans


class ChatTokens(NamedTuple):
    """The tokens of a conversation without the end of its document."""

    tokens: IntArray
    is_target: BoolArray | None
    """of each token and of the end of the document; none where all are targets"""


class ChatTokenizer:
    """Tokenizes conversations with a template."""

    def __init__(self, tokenizer: Tokenizer, renderer: ChatRenderer, *, mask_prompts: bool) -> None:
        self._tokenizer, self._renderer, self._mask_prompts = tokenizer, renderer, mask_prompts
        special = sorted(filter(None, tokenizer.special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special))) if special else None

    def encode(self, record: ChatRecord) -> ChatTokens:
        messages, marks = record.messages, None
        try:
            if self._special is not None and any(map(self._special.search, _texts(messages))):
                marks = unused_marks("".join(_texts(messages)))
                messages = [self._mark_special(message, marks) for message in messages]
            rendered, turns = self._renderer.render(messages, find_turns=self._mask_prompts)
            pieces = [rendered] if marks is None else split_at_marks(rendered, marks, "a special token of a message")
        except ValueError as error:
            raise TextError(f"{record.where}: {error}") from error
        spans = self._encode_pieces(pieces)
        tokens = spans.tokens
        ends_with_eos = len(tokens) > 0 and int(tokens[-1]) == self._tokenizer.eos
        is_target = None
        if self._mask_prompts:
            is_target = tokens_in_turns(spans.starts, spans.ends, turns, len(rendered))
            if not ends_with_eos:
                is_target = np.append(is_target, messages[-1]["role"] == ASSISTANT)
        return ChatTokens(tokens[:-1] if ends_with_eos else tokens, is_target)

    def _mark_special(self, value: Any, marks: tuple[str, str]) -> Any:
        """Put marks around every special token that a text inside of a message spells."""
        assert self._special is not None
        if isinstance(value, str):
            return self._special.sub(lambda match: marks[0] + match[0] + marks[1], value)
        if isinstance(value, list):
            return [self._mark_special(item, marks) for item in value]
        if isinstance(value, dict):
            return {name: self._mark_special(item, marks) for name, item in value.items()}
        return value

    def _encode_pieces(self, pieces: Sequence[str]) -> TokenSpans:
        """Tokens of pieces that were separated by one mark each; every second one is plain text."""
        position, encoded = 0, []
        for number, piece in enumerate(pieces):
            spans = self._tokenizer.encode_spans(piece, special=number % 2 == 0)
            encoded.append(TokenSpans(spans.tokens, spans.starts + position, spans.ends + position))
            position += len(piece) + 1
        return TokenSpans(*map(np.concatenate, zip(*encoded, strict=True)))


def _texts(value: Any) -> Iterator[str]:
    """All texts inside of a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def tokens_in_turns(starts: IntArray, ends: IntArray, turns: Sequence[tuple[int, int]], length: int) -> BoolArray:
    """Whether each token, from its first character to its end, has a character of a turn."""
    inside = np.zeros(length + 1, np.int64)
    for start, end in turns:
        inside[start:end] = 1
    # A token without characters, such as a space that a tokenizer puts first, belongs to the character it stands at.
    ends = np.maximum(ends, starts + 1)
    before = np.concatenate([[0], np.cumsum(inside)])
    return before[np.minimum(ends, length + 1)] > before[starts]
