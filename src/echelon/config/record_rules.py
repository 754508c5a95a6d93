"""Rules of `data.*` for JSONL, Parquet and conversations: fields, chat template, tokenizer, missing packages.

The data package is imported only where a key asks for it: it imports NumPy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.input_file import InputFileError, read_text
from echelon.layout.validation_error import ValidationIssue, did_you_mean

if TYPE_CHECKING:
    from echelon.config.sections import DataConfig

RECORD_KEYS = ("data.text_field", "data.chat_field", "data.chat_template", "data.train_on")
CHAT_KEYS = RECORD_KEYS[2:]


def record_issues(data: DataConfig) -> Iterator[ValidationIssue]:
    """Check the keys of records, and that what reads the files of `data.path` is installed."""
    for path in data.path:
        from echelon.data.file_format import format_problem

        if problem := format_problem(Path(path)):
            yield ValidationIssue("data.path", path, problem)
    if not data.text_field and not data.chat_field:
        message = "leaves no field to read (data.chat_field is empty)"
        yield ValidationIssue("data.text_field", '""', message, legal="a name in at least one of the two")
    elif data.text_field == data.chat_field:
        message = "is the field of a text and of conversations (data.text_field)"
        yield ValidationIssue("data.chat_field", data.chat_field, message, legal="another field, or none")
    if message := _template_problem(data.chat_template):
        legal = "chatml, or a Jinja file of at most 1 MiB"
        hint = did_you_mean(data.chat_template, ["chatml"])
        yield ValidationIssue("data.chat_template", data.chat_template, message, legal=legal, hint=hint)
    yield from _tokenizer_issues(data.tokenizer)


def records_without_effect(data: DataConfig) -> dict[str, str]:
    """Return the keys of records that have no effect, each with the reason."""
    if not _may_have_records(data.path):
        return dict.fromkeys(RECORD_KEYS, "a data.path without JSONL and Parquet")
    return {} if data.chat_field else dict.fromkeys(CHAT_KEYS, "an empty data.chat_field")


def _may_have_records(paths: Sequence[str]) -> bool:
    if not paths:
        return False
    from echelon.data.file_format import may_hold_records

    return any(may_hold_records(Path(path)) for path in paths)


def _template_problem(spec: str) -> str:
    """Return why a chat template cannot be used, as the end of a sentence; empty if its syntax is valid."""
    if not spec:
        return ""
    from echelon.data.chat_template import CHATML_NAME, MAX_TEMPLATE_BYTES, missing_jinja
    from echelon.data.template_worker import parse_template

    if spec == CHATML_NAME:
        return ""
    try:
        source = read_text(spec, max_bytes=MAX_TEMPLATE_BYTES)
        if missing := missing_jinja():
            return missing
        parse_template(source)
    except InputFileError as error:
        return error.reason
    except ValueError as error:
        return f"is not valid Jinja ({error})"
    return ""


def _tokenizer_issues(spec: str) -> Iterator[ValidationIssue]:
    if spec == "bytes" or os.path.isfile(spec):
        return
    legal = "bytes, a tokenizers JSON file, or a directory with a tokenizer.json"
    message = "does not exist"
    if os.path.isdir(spec):
        if os.path.isfile(os.path.join(spec, "tokenizer.json")):
            return
        message = "is a directory without a tokenizer.json"
    hint = did_you_mean(spec, ["bytes"])
    yield ValidationIssue("data.tokenizer", spec, message, legal=legal, hint=hint)
