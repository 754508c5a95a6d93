"""Records of JSONL and Parquet files: a text, or the messages of a conversation.

[Note: which records are conversations]

Each record is judged alone, by its own fields, and a null counts as a missing field:

    has `data.text_field`    has `data.chat_field`
    yes                      no                       a text, a document of its own
    no                       yes                      a conversation
    yes                      yes                      refused: an empty data.text_field or data.chat_field chooses
    no                       no                       refused

So a file never changes its meaning with its first record, its size or its name.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from echelon.data.chat_template import CHATML, ChatTemplate, Message
from echelon.data.decompression import TextInput
from echelon.data.file_format import TextError
from echelon.input_file import MIB, parse_json

MAX_RECORD_BYTES = 64 * MIB
"""of a line of JSONL, a text of Parquet or a conversation"""
MAX_NAMED = 8
"""fields or roles that an error names"""
ASSISTANT = "assistant"


@dataclass(frozen=True, kw_only=True)
class RecordFormat:
    """How records become documents."""

    text_field: str = "text"
    """Field with the text; empty: no record is a text."""
    chat_field: str = "messages"
    """Field with the messages; empty: no record is a conversation."""
    chat_template: ChatTemplate = field(default=CHATML)
    """Template that renders a conversation."""
    train_on: Literal["assistant", "all"] = "assistant"
    """The targets of a conversation: the turns of the assistant, or all tokens."""

    @property
    def key(self) -> list[str]:
        """Formats with equal keys make the same documents."""
        return [self.text_field, self.chat_field, self.chat_template.key, self.train_on]


@dataclass(frozen=True)
class TextRecord:
    where: str
    """file and line, or file and row"""
    text: str


@dataclass(frozen=True)
class ChatRecord:
    where: str
    messages: list[Message]


@dataclass(frozen=True)
class RecordFault:
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" + ("" if ";" in self.message else "; correct or remove the record")


Record = TextRecord | ChatRecord | RecordFault


class JsonLines:
    """The records of a JSONL file, compressed or not: a JSON object in each line that is not blank."""

    def __init__(self, path: Path, records: RecordFormat) -> None:
        self._path, self._records, self._input = path, records, TextInput(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._input.__exit__(*error)

    @property
    def position(self) -> int:
        """Bytes of the file that are read."""
        return self._input.position

    def __iter__(self) -> Iterator[Record]:
        number = 0
        while line := self._input.text.readline(MAX_RECORD_BYTES + 1):
            number += 1
            where = f"{self._path}:{number}"
            if len(line) > MAX_RECORD_BYTES:
                raise TextError(f"{where}: the line is too long (more than {MAX_RECORD_BYTES / MIB:g} MiB); divide it")
            if not line.isspace():
                yield self._parse(where, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)

    def _parse(self, where: str, line: bytes) -> Record:
        try:
            value = parse_json(line.decode().rstrip("\r\n"))
        except UnicodeDecodeError as error:
            return RecordFault(where, f"the line is not UTF-8 ({error.reason} at byte {error.start})")
        except ValueError as error:
            reason = str(error)
            if isinstance(error, json.JSONDecodeError):  # its own text names line 1
                reason = f"{error.msg} at character {error.pos + 1}"
            return RecordFault(where, f"the line is not valid JSON ({reason[:1].lower()}{reason[1:]})")
        if not isinstance(value, dict):
            return RecordFault(where, f"the line is {describe_type(value)}, not a JSON object")
        return parse_record(value, where, self._records)


def parse_record(fields: Mapping[str, Any], where: str, records: RecordFormat) -> Record:
    """Convert the fields of a record; see [Note: which records are conversations]."""
    text = fields.get(records.text_field) if records.text_field else None
    messages = fields.get(records.chat_field) if records.chat_field else None
    if text is not None and messages is not None:
        return RecordFault(
            where,
            f'the record has a "{records.text_field}" and a "{records.chat_field}"; '
            'set data.text_field="" or data.chat_field="" to use the other',
        )
    if text is None and messages is None:
        return RecordFault(where, missing_fields(fields, records))
    if messages is not None:
        fault = _chat_problem(messages, records)
        if fault:
            return RecordFault(where, f'field "{records.chat_field}" {fault}')
        return ChatRecord(where, [_without_nulls(message) for message in messages])
    if not isinstance(text, str):
        return RecordFault(where, f'field "{records.text_field}" is {describe_type(text)}, not a text')
    if len(text) > MAX_RECORD_BYTES:
        return RecordFault(where, f'field "{records.text_field}" is too long (more than {MAX_RECORD_BYTES >> 20} MiB)')
    if not _is_unicode(text):
        return RecordFault(where, f'field "{records.text_field}" is not valid Unicode text')
    return TextRecord(where, text)


def missing_fields(fields: Mapping[str, Any] | list[str], records: RecordFormat) -> str:
    wanted = " or ".join(f'"{name}"' for name in (records.text_field, records.chat_field) if name)
    return f"missing field {wanted} (fields: {_named(fields)}); set data.text_field or data.chat_field"


def describe_type(value: Any) -> str:
    """The JSON type of a value."""
    names = {bool: "true or false", str: "a text", list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"of type {type(value).__name__}")


def _chat_problem(messages: Any, records: RecordFormat) -> str:
    """Return why messages are no conversation, as the end of a sentence; empty if they are one."""
    if not isinstance(messages, list):
        return f"is {describe_type(messages)}, not a list of messages"
    if not messages:
        return "is an empty list of messages"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            return f"has {describe_type(message)} as message {number}, not an object with role and content"
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            return f'has no "role" in message {number} (fields: {_named(message)})'
        if content is None and not message.get("tool_calls"):
            return f'has no "content" in message {number} (fields: {_named(message)})'
        if content is not None and not isinstance(content, str):
            return f'has {describe_type(content)} as "content" of message {number}, not a text'
    if records.train_on == ASSISTANT and not any(message["role"] == ASSISTANT for message in messages):
        roles = _named(dict.fromkeys(message["role"] for message in messages))
        return f'has no message with role "{ASSISTANT}" (roles: {roles}); nothing in it is a target'
    try:
        text = json.dumps(messages, ensure_ascii=False)
    except (TypeError, RecursionError) as error:  # Parquet has more types than JSON
        return f"has a value that JSON has not ({error})"
    if len(text) > MAX_RECORD_BYTES:
        return f"is too long (more than {MAX_RECORD_BYTES >> 20} MiB)"
    return "" if _is_unicode(text) else "is not valid Unicode text"


def _without_nulls(message: Message) -> Message:
    """A message without its nulls: Parquet gives all messages the same fields."""
    return {name: value for name, value in message.items() if value is not None}


def _is_unicode(text: str) -> bool:
    """Whether the text has no half of a surrogate pair, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _named(names: Any) -> str:
    """The first of some names, shortened."""
    shown = [str(name)[:40] for name in list(names)[:MAX_NAMED]]
    return ", ".join(shown) + (", ..." if len(names) > MAX_NAMED else "") if shown else "none"
