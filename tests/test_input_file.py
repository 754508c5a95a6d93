"""Files of a user are limited in kind, size, depth and numbers before anything reads them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from echelon.input_file import (
    MAX_DEPTH,
    InputFileError,
    open_input,
    parse_json,
    parse_toml,
    read_json,
    read_text,
    read_toml,
)


def reason(path: Path, read=read_text, **options) -> str:
    with pytest.raises(InputFileError) as info:
        read(path, **options)
    assert str(info.value) == f"{path} {info.value.reason}"
    return info.value.reason


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    fifo, loop = tmp_path / "fifo", tmp_path / "loop"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    assert "it is a FIFO" in reason(fifo), "and its writer is not waited for"
    assert "it is a directory" in reason(tmp_path)
    assert "it is a device" in reason(Path("/dev/zero"))
    assert "too many levels of symbolic links" in reason(loop)
    assert "no such file or directory" in reason(tmp_path / "none")
    assert "file name too long" in reason(tmp_path / ("x" * 300))
    assert "null byte" in reason(Path("a\0b"))
    assert len(os.listdir("/proc/self/fd")) < 200, "and no descriptor stays open"


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run as root, whom no permission stops."""

    def refuse(*_args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert reason(tmp_path / "x") == "cannot be read (permission denied)"


def test_sizes_are_limited_before_and_while_reading(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.truncate(1 << 42)
    assert reason(path) == "is too large (more than 64 MiB)"
    assert reason(path, open_input, max_bytes=1 << 20) == "is too large (more than 1 MiB)"
    # Files of /proc state no size.
    assert "is too large" in reason(Path("/proc/self/status"), max_bytes=10)
    path.write_bytes(b"0123456789")
    assert read_text(path, max_bytes=10) == "0123456789"
    assert "is too large" in reason(path, max_bytes=9)


def test_text_is_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc\xff")
    assert reason(path) == "is not UTF-8 text (invalid start byte at byte 3)"


@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_depth_is_limited(brackets: str) -> None:
    open_, close = ('{"a":', "}") if brackets == "{}" else ("[", "]")
    middle = "1"
    parse_json(open_ * MAX_DEPTH + middle + close * MAX_DEPTH)
    for depth in (MAX_DEPTH + 1, 500, 100_000):
        with pytest.raises(ValueError, match="nested more than 64 deep"):
            parse_json(open_ * depth + middle + close * depth)


def test_depth_of_toml_is_limited() -> None:
    assert parse_toml("a" + ".a" * 60 + " = 1")
    # 500,000 parts take tomllib hours.
    deep = (
        "a = " + "[" * 50_000,
        "a" + ".a" * 500_000 + " = 1",
        "[" + "a." * 100_000 + "a]",
        '"a" . ' * 9000 + "b = 1",
    )
    for text in deep:
        with pytest.raises(ValueError, match="nested more than 64 deep"):
            parse_toml(text)
    assert parse_toml("x = '" + "word. another word. " * 1000 + "'"), "sentences are no keys"


def test_numbers_are_limited() -> None:
    assert parse_json("1" * 100)
    for text in ("1" * 101, "-" + "1" * 10_000, json.dumps({"a": [10**120]})):
        with pytest.raises(ValueError, match="an integer of more than 100 digits"):
            parse_json(text)
    with pytest.raises(ValueError, match="an integer of more than 100 digits"):
        parse_toml("x = " + "9" * 5000)


def test_the_reason_names_the_format(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("{")
    assert reason(path, read_json).startswith("is not valid JSON (expecting property name")
    path.write_text("[a")
    assert reason(path, read_toml).startswith("is not valid TOML (expected ']'")
