import sys
from importlib.util import find_spec

import pytest

from echelon.config.run_config import Config
from echelon.layout.validation_error import ValidationError

RECORD_KEYS = ("data.text_field", "data.chat_field", "data.chat_template", "data.train_on")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Text, records and a tokenizer directory, in the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    for name in ("a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet", "a.txt.zst", "a.parquet.gz", "good.jinja"):
        (tmp_path / name).write_text("x")
    (tmp_path / "bad.jinja").write_text("{% if %}")
    (tmp_path / "deep.jinja").write_text("{{ " + "(" * 5000 + ")" * 5000 + " }}")
    (tmp_path / "binary.jinja").write_bytes(b"\xff")
    (tmp_path / "long.jinja").write_bytes(b"x" * (1 << 21))
    return tmp_path


def issues_of(*settings):
    with pytest.raises(ValidationError) as caught:
        Config.load(None, settings)
    return {issue.key: str(issue) for issue in caught.value.issues}


def test_the_keys_of_records(files):
    given = ["data.path=a.jsonl", "data.text_field=body", "data.chat_field=talk", "data.train_on=all"]
    data = Config.load(None, [*given, "data.chat_template=good.jinja", "data.tokenizer=hf"]).data
    assert (data.text_field, data.chat_field, data.train_on) == ("body", "talk", "all")
    assert (data.chat_template, data.tokenizer) == ("good.jinja", "hf")
    for path in ("a.jsonl.gz", "a.parquet", "folder", '["a.txt", "a.jsonl"]'):
        assert Config.load(None, [f"data.path={path}", *given[1:]]).data.train_on == "all"
    Config.load(None, ["data.path=a.jsonl", "data.chat_template=chatml", "data.text_field="])


def test_all_faults_at_once(files):
    found = issues_of(
        *('data.path=["a.jsonl", "a.parquet.gz"]', "data.text_field=messages", "data.chat_template=bad.jinja"),
        *("data.train_on=assistent", "data.tokenizer=folder", "steps=0"),
    )
    assert found["data.chat_field"].startswith("data.chat_field=messages is the field of a text and of conversations")
    assert "is not valid Jinja (line 1: Expected an expression" in found["data.chat_template"]
    assert found["data.train_on"].endswith('legal: assistant, all; did you mean "assistant"?')
    assert found["data.tokenizer"] == (
        "data.tokenizer=folder is a directory without a tokenizer.json; legal: bytes, a tokenizers JSON file, or a "
        "directory with a tokenizer.json"
    )
    assert found["data.path"] == (
        "data.path=a.parquet.gz is a compressed Parquet file, and Parquet compresses its columns itself; decompress it"
    )
    assert "steps" in found


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("none.jinja", "cannot be read (no such file or directory); legal: chatml, or a Jinja file of at most 1 MiB"),
        ("chatmll", 'did you mean "chatml"?'),
        ("folder", "it is a directory"),
        ("binary.jinja", "is not UTF-8 text"),
        ("long.jinja", "is too large (more than 1 MiB)"),
        ("deep.jinja", "is not valid Jinja (it is nested too deep)"),
    ],
)
def test_what_is_no_template(files, template, says):
    assert says in issues_of("data.path=a.jsonl", f"data.chat_template={template}")["data.chat_template"]


def test_a_record_needs_a_field(files):
    found = issues_of("data.path=a.jsonl", "data.text_field=", "data.chat_field=")
    rule = "leaves no field to read (data.chat_field is empty); legal: a name in at least one of the two"
    assert found["data.text_field"] == f'data.text_field="" {rule}'


ZSTD = pytest.param("a.txt.zst", marks=pytest.mark.skipif(find_spec("zstandard") is None, reason="no zstandard"))


@pytest.mark.parametrize("path", ["a.txt", "[]", ZSTD, "data.tokens"])
def test_keys_of_records_have_no_effect_without_records(files, path):
    (files / "data.tokens").write_text("x")
    found = issues_of(
        *(f"data.path={path}", "data.text_field=a", "data.chat_field=b", "data.chat_template=good.jinja"),
        "data.train_on=all",
    )
    assert found.keys() == set(RECORD_KEYS)
    for key in RECORD_KEYS:
        assert "has no effect with a data.path without JSONL and Parquet; leave it out" in found[key]


def test_keys_of_conversations_have_no_effect_without_their_field(files):
    found = issues_of(
        *("data.path=a.jsonl", "data.chat_field=", "data.chat_template=good.jinja", "data.train_on=all"),
    )
    assert found.keys() == {"data.chat_template", "data.train_on"}
    assert "has no effect with an empty data.chat_field" in found["data.train_on"]


def test_a_run_writes_the_keys_that_have_an_effect(files):
    for path, written in (("a.txt", ()), ("a.jsonl", RECORD_KEYS), ("folder", RECORD_KEYS)):
        config = Config.load(None, [f"data.path={path}"])
        text = config.to_toml()
        assert [key for key in RECORD_KEYS if f"\n{key.removeprefix('data.')} = " in text] == list(written)
        assert Config.from_toml(text) == config
    config = Config.load(None, ["data.path=a.jsonl", "data.chat_field=", "data.text_field=x"])
    assert "train_on" not in config.to_toml()
    assert Config.from_toml(config.to_toml()) == config


def test_missing_packages_are_reported_before_a_run(files, monkeypatch):
    for name in ("pyarrow", "zstandard", "jinja2"):
        monkeypatch.setitem(sys.modules, name, None)
    install = 'run pip install "echelon[data]"'
    assert issues_of("data.path=a.parquet")["data.path"].endswith(f"a.parquet needs the pyarrow package; {install}")
    assert issues_of("data.path=a.txt.zst")["data.path"].endswith(f"a.txt.zst needs the zstandard package; {install}")
    found = issues_of("data.path=a.jsonl", "data.chat_template=good.jinja")["data.chat_template"]
    assert f"data.chat_template=good.jinja needs the jinja2 package; {install}" in found
    Config.load(None, ["data.path=a.jsonl", "data.chat_template=chatml"])


def test_names_that_no_file_can_have(files):
    long = "x" * 5000
    assert issues_of(f"data.path={long}.jsonl", f"data.tokenizer={long}", f"data.chat_template={long}").keys() == {
        *("data.path", "data.tokenizer", "data.chat_template")
    }
