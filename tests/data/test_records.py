import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echelon.data import ByteTokenizer, RecordFormat, TextError, TokenFile, prepare_token_file, tokenize
from echelon.data.records import ChatRecord, JsonLines, Record, RecordFault, TextRecord

zstandard = pytest.importorskip("zstandard")
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


def read(path: Path, text: str | bytes, **format_: Any) -> list[Record]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with JsonLines(path, RecordFormat(**format_)) as records:
        return list(records)


def fault(tmp_path: Path, record: Any, **format_: Any) -> str:
    (found,) = read(tmp_path / "x.jsonl", json.dumps(record), **format_)
    assert isinstance(found, RecordFault)
    assert found.where == f"{tmp_path / 'x.jsonl'}:1"
    return found.message


def documents(file: TokenFile) -> list[bytes]:
    ends = [*file.offsets[1:].tolist(), len(file.tokens)]
    return [bytes(file.tokens[a : b - 1].astype(np.uint8)) for a, b in zip(file.offsets, ends, strict=True)]


# -- which records are conversations ----------------------------------------------------------------------------------


def test_each_record_is_judged_by_its_own_fields(tmp_path: Path) -> None:
    lines: list[Mapping[str, Any]] = [
        {"text": "a", "id": 1},
        {"messages": HELLO},
        {"text": "b", "messages": None},
        {"messages": HELLO, "text": None},
        {"text": ""},
    ]
    found = read(tmp_path / "x.jsonl", "\n".join(map(json.dumps, lines)))
    where = [f"{tmp_path / 'x.jsonl'}:{number}" for number in range(1, 6)]
    assert found == [
        TextRecord(where[0], "a"),
        ChatRecord(where[1], HELLO),
        TextRecord(where[2], "b"),
        ChatRecord(where[3], HELLO),
        TextRecord(where[4], ""),
    ]


def test_other_fields(tmp_path: Path) -> None:
    line = json.dumps({"body": "a", "talk": HELLO, "text": 1, "messages": 2})
    path = tmp_path / "x.jsonl"
    assert read(path, line, text_field="body", chat_field="") == [TextRecord(f"{path}:1", "a")]
    assert read(path, line, text_field="", chat_field="talk") == [ChatRecord(f"{path}:1", HELLO)]


def test_a_record_with_both_fields_or_neither_is_refused(tmp_path: Path) -> None:
    both = fault(tmp_path, {"text": "a", "messages": HELLO})
    assert both == (
        'the record has a "text" and a "messages"; set data.text_field="" or data.chat_field="" to use the other'
    )
    neither = fault(tmp_path, {"txt": "a", "b" * 99: 1, **dict.fromkeys("cdefghij")})
    assert neither.startswith(
        f'missing field "text" or "messages" (fields: txt, {"b" * 40}, c, d, e, f, g, h, ...); set'
    )
    assert fault(tmp_path, {}, chat_field="") == (
        'missing field "text" (fields: none); set data.text_field or data.chat_field'
    )


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("Hello", "is a text, not a list of messages"),
        ([], "is an empty list of messages"),
        ([HELLO], "has a list as message 1, not an object with role and content"),
        ([*HELLO, {"from": "human", "value": "x"}], 'has no "role" in message 3 (fields: from, value)'),
        ([{"role": 1, "content": "x"}], 'has no "role" in message 1'),
        ([{"role": "user"}], 'has no "content" in message 1 (fields: role)'),
        ([{"role": "user", "content": None}], 'has no "content" in message 1'),
        ([{"role": "user", "content": [{"type": "image"}]}], 'has a list as "content" of message 1, not a text'),
        ([{"role": "user", "content": True}], 'has true or false as "content" of message 1, not a text'),
        (HELLO[:1], 'has no message with role "assistant" (roles: user); nothing in it is a target'),
        ([*HELLO, {"role": "user", "content": "\ud800"}], "is not valid Unicode text"),
    ],
)
def test_what_is_no_conversation(tmp_path: Path, messages: Any, says: str) -> None:
    assert fault(tmp_path, {"messages": messages}).startswith(f'field "messages" {says}')


def test_all_roles_may_be_trained_on_without_an_assistant(tmp_path: Path) -> None:
    (record,) = read(tmp_path / "x.jsonl", json.dumps({"messages": HELLO[:1]}), train_on="all")
    assert isinstance(record, ChatRecord)


def test_a_call_of_a_tool_needs_no_content(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": None}}], "name": None}
    (record,) = read(tmp_path / "x.jsonl", json.dumps({"messages": [*HELLO, call]}))
    assert isinstance(record, ChatRecord)
    assert record.messages[-1] == {"role": "assistant", "tool_calls": call["tool_calls"]}


# -- lines ------------------------------------------------------------------------------------------------------------


def test_blank_lines_a_byte_order_mark_and_line_ends(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"text": "a"}\r\n\n  \t\n{"text": "b"}'
    path = tmp_path / "x.jsonl"
    assert read(path, data) == [TextRecord(f"{path}:1", "a"), TextRecord(f"{path}:4", "b")]
    assert read(path, "\n\n") == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "a"', "the line is not valid JSON (expecting ',' delimiter at character 13)"),
        (b'{"text": "a"} {}', "the line is not valid JSON (extra data at character 15)"),
        (b'{"text": "\xff"}', "the line is not UTF-8 (invalid start byte at byte 10)"),
        ('{"text": "a"}'.encode("utf-16"), "the line is not UTF-8 (invalid start byte at byte 0)"),
        (b'{"text": "a\0"}', "the line is not valid JSON (invalid control character"),
        (b"[" * 100_000, "the line is not valid JSON (nested more than 64 deep)"),
        (b'{"text": "a", "n": ' + b"9" * 10_000 + b"}", "the line is not valid JSON (an integer of more than 100"),
        (b'["text"]', "the line is a list, not a JSON object"),
        (b"null", "the line is null, not a JSON object"),
        (b'{"text": 5}', 'field "text" is a number, not a text'),
        (b'{"text": {}}', 'field "text" is an object, not a text'),
        (b'{"text": "\\ud800"}', 'field "text" is not valid Unicode text'),
    ],
)
def test_lines_that_are_no_records(tmp_path: Path, line: bytes, says: str) -> None:
    path = tmp_path / "x.jsonl"
    _, found, _ = read(path, b'{"text": "a"}\n' + line + b'\n{"text": "c"}\n')
    assert str(found).startswith(f"{path}:2: {says}")


def test_a_line_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.data.records.MAX_RECORD_BYTES", 100)
    path = tmp_path / "x.jsonl"
    fits = json.dumps({"text": "a" * 88})
    assert len(fits) == 100
    with pytest.raises(TextError, match=r"x.jsonl:2: the line is too long .*divide it"):
        read(path, f'{{"text": ""}}\n{fits} \n')
    assert len(read(path, fits)) == 1


def test_the_faults_of_a_file_are_reported_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    lines = ["{}" if number % 2 else '{"text": "a"}' for number in range(1, 41)]
    path.write_text("\n".join(lines))
    with pytest.raises(TextError) as caught:
        tokenize([path], tmp_path / "x.tokens")
    shown = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in shown[:-1]] == [f"{path}:{number}" for number in range(1, 20, 2)]
    assert shown[-1] == "... and 10 more"
    assert not (tmp_path / "x.tokens").exists()
    path.write_text('{"text": 1}\n')
    with pytest.raises(TextError, match=r'^[^\n]*x.jsonl:1: field "text" .* text; correct or remove the record$'):
        tokenize([path], tmp_path / "x.tokens")
    # The first fault counts, also where the rest of the file cannot be read at all.
    data = gzip.compress(b"\n".join([b'{"text": 1}', *(json.dumps({"text": n * "x"}).encode() for n in range(300))]))
    (tmp_path / "y.jsonl.gz").write_bytes(data[:-50])
    monkeypatch.setattr("echelon.data.decompression.MAX_READ", 64)
    with pytest.raises(TextError, match=r"y.jsonl.gz:1: field"):
        tokenize([tmp_path / "y.jsonl.gz"], tmp_path / "x.tokens")


# -- every format gives the same tokens -------------------------------------------------------------------------------


def write_formats(folder: Path, records: Sequence[Mapping[str, Any]]) -> list[Path]:
    text = "".join(json.dumps(record) + "\n" for record in records)
    paths = [folder / f"x.{name}" for name in ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")]
    paths[0].write_text(text)
    paths[1].write_bytes(gzip.compress(text.encode()))
    paths[2].write_bytes(zstandard.ZstdCompressor().compress(text.encode()))
    pq.write_table(pa.Table.from_pylist([dict(record) for record in records]), paths[3], row_group_size=5)
    return paths


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXTS},
        optional={"name": TEXTS | st.none()},
    ),
    max_size=5,
).map(lambda messages: [*messages, {"role": "assistant", "content": "end"}])


@given(
    records=st.lists(
        st.fixed_dictionaries({"text": TEXTS}) | st.fixed_dictionaries({"messages": MESSAGES}), min_size=1, max_size=20
    )
)
@settings(max_examples=25, deadline=None, suppress_health_check=CHECKS)
def test_every_format_gives_the_same_tokens_and_mask(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    """Parquet gives every record a text and messages, and every message a name, all of them null where missing."""
    records.append({"text": "last"})
    paths = write_formats(tmp_path, [{"text": None, "messages": None} | record for record in records])
    (tmp_path / "plain.jsonl").write_text("\n".join(map(json.dumps, records)))
    expected = tokenize([tmp_path / "plain.jsonl"], tmp_path / "plain.tokens").path.read_bytes()
    for path in paths:
        tokenize([path], tmp_path / "x.tokens")
        assert (tmp_path / "x.tokens").read_bytes() == expected, path.name


def test_a_text_has_the_tokens_of_a_text_file(tmp_path: Path) -> None:
    texts = ["one", "zwei é🙂\n", "three\r\n\r\n"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    tokenize([tmp_path / f"{number}.txt" for number in range(3)], tmp_path / "text.tokens")
    for path in write_formats(tmp_path, [{"text": text} for text in texts]):
        tokenize([path], tmp_path / "x.tokens")
        assert (tmp_path / "x.tokens").read_bytes() == (tmp_path / "text.tokens").read_bytes()
        assert documents(TokenFile(tmp_path / "x.tokens")) == [text.encode() for text in texts]


def test_a_directory_mixes_formats(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("plain")
    (folder / "b.jsonl").write_text('{"text": "line"}\n{"text": "line 2"}\n')
    pq.write_table(pa.table({"text": ["row"]}), folder / "c.parquet")
    calls: list[tuple[int, int]] = []
    file = tokenize([folder], tmp_path / "x.tokens", progress=lambda done, total: calls.append((done, total)))
    assert documents(file) == [b"plain", b"line", b"line 2", b"row"]
    assert calls == sorted(calls)
    assert calls[-1] == (sum(path.stat().st_size for path in folder.iterdir()),) * 2


# -- the cache --------------------------------------------------------------------------------------------------------


def test_the_cache_keeps_the_tokens_of_each_setting_apart(tmp_path: Path) -> None:
    from echelon.data import ChatTemplate

    class OtherEnd(ByteTokenizer):
        eos = 255

    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a", "body": "b"}) + "\n")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    formats = [
        RecordFormat(),
        RecordFormat(text_field="body"),
        RecordFormat(chat_field="talk"),
        RecordFormat(train_on="all"),
        RecordFormat(chat_template=ChatTemplate(origin="a", source=template)),
        RecordFormat(chat_template=ChatTemplate(origin="a", source=template + " ")),
        RecordFormat(chat_template=ChatTemplate(origin="a", source=template, variables={"bos_token": "<s>"})),
    ]
    tokenizers = [ByteTokenizer()] * len(formats) + [OtherEnd()]
    paths = [
        prepare_token_file(tmp_path / "x.jsonl", tmp_path / "cache", tokenizer=tokenizer, records=records)
        for tokenizer, records in zip(tokenizers, [*formats, formats[0]], strict=True)
    ]
    assert len(set(paths)) == len(paths)
    elsewhere = RecordFormat(chat_template=ChatTemplate(origin="b", source=template))
    again = prepare_token_file(tmp_path / "x.jsonl", tmp_path / "cache", tokenizer=ByteTokenizer(), records=elsewhere)
    assert again == paths[4], "where a template comes from does not matter"


def test_the_extra_packages_are_imported_only_where_they_are_needed() -> None:
    import subprocess

    code = "import sys, echelon.data; sys.exit(bool({'pyarrow', 'jinja2', 'zstandard'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
