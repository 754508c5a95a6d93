"""`echelon import` and `echelon export`, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from echelon.cli.conversion_progress import parse_file_size


def run(*words: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.stdout, done.stderr


def test_out_and_in(tmp_path: Path) -> None:
    code, text, _ = run("export", "llama-tiny", tmp_path / "out", "--shard-size", "200KB", "--json")
    facts = json.loads(text)
    assert code == 0
    assert (facts["model_type"], facts["parameters"], facts["tensors"]) == ("llama", 217792, 39)
    assert facts["bytes"] == 4 * 217792
    assert {*facts["files"]} | {"model.safetensors.index.json"} == {p.name for p in (tmp_path / "out").iterdir()}
    code, text, _ = run("import", tmp_path / "out", tmp_path / "in", "--dtype", "bfloat16")
    assert code == 0
    assert "llama, 217,792 parameters, 39 tensors of bfloat16, 435,584 bytes in 1 file" in " ".join(text.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["export", "llama-tny", "out"],
            'source=llama-tny is neither a run, a checkpoint, a directory .*did you mean "llama-tiny"',
        ),
        (
            ["export", "llama-tiny", "out", "--dtype", "int8"],
            "dtype=int8 is not a supported dtype; legal: keep, float64",
        ),
        (["export", "llama-tiny", "out", "--shard-size", "5"], "shard-size=5 is not a valid file size"),
        (["import", "nowhere", "out"], "model=nowhere cannot be read"),
    ],
)
def test_faults(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    monkeypatch.chdir(tmp_path)
    code, text, error = run(*words, "--json")
    assert code == 2
    assert re.search(said, error)
    assert re.search(said, json.loads(text)["errors"][0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["import", "export"])
def test_help_has_examples(name: str) -> None:
    code, text, _ = run(name, "--help")
    assert code == 0
    assert f"echelon {name} " in text
    assert "--shard-size" in text


def test_max_shard_size_is_parsed() -> None:
    assert [parse_file_size(text) for text in ("5GB", "1.5 mb", "20KB")] == [5 * 10**9, 1_500_000, 20_000]
