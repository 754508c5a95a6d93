"""Files that a user gives: the one place where they are opened, limited and parsed.

[Note: what a hostile file can do]

    a FIFO, a device                blocks, or never ends     opened without blocking; only regular files are read
    more bytes than memory          exhausts it               a limit for each kind of file, before it is read
    brackets 100,000 deep           exhausts the stack        MAX_DEPTH
    an integer of 10,000 digits     overflows a float         MAX_INTEGER
    other bytes than UTF-8, other values than expected        one sentence; the reader of each format checks its types

Every failure, of the operating system too, is an `InputFileError` with the path and the reason. No torch.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

MIB = 1 << 20
MAX_TOML_BYTES, MAX_JSON_BYTES, MAX_TEXT_BYTES = MIB // 4, 16 * MIB, 64 * MIB
MAX_DEPTH = 64
"""of lists and tables in each other"""
TOO_DEEP = f"nested more than {MAX_DEPTH} deep"
TOO_LONG = "an integer of more than 100 digits"
MAX_INTEGER = 10**100
"""integers below it are floats too; the range of a key is checked with the key"""
_DOTTED_KEY = re.compile(rf"""(?<![\w\-"'.])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MAX_DEPTH + 1}}}""")
KINDS = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))

AnyPath = str | os.PathLike[str]


class InputFileError(ValueError):
    """A file cannot be read."""

    def __init__(self, path: AnyPath, reason: str) -> None:
        self.path, self.reason = os.fspath(path), reason
        """the reason is the end of a sentence that starts with the path"""
        super().__init__(self.path, reason)

    def __str__(self) -> str:
        return f"{self.path} {self.reason}"


def os_reason(error: OSError) -> str:
    """What the operating system says, in lower case."""
    return (error.strerror or str(error) or type(error).__name__).lower()


def open_input(path: AnyPath, *, max_bytes: int | None = None) -> BinaryIO:
    """Open a regular file, of a limited size, to read it. A FIFO or a device is refused and not waited for."""
    try:
        # Without O_NONBLOCK the opening of a FIFO waits for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InputFileError(path, f"cannot be read ({os_reason(error)})") from error
    except ValueError as error:  # a NUL in the path
        raise InputFileError(path, f"cannot be read ({error})") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = next((name for is_kind, name in KINDS if is_kind(status.st_mode)), "a device")
            raise InputFileError(path, f"cannot be read (it is {kind}, not a regular file)")
        if max_bytes is not None and status.st_size > max_bytes:
            raise InputFileError(path, _too_large(max_bytes))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _too_large(max_bytes: int) -> str:
    return f"is too large (more than {max_bytes / MIB:g} MiB)"


def read_bytes(path: AnyPath, *, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    with open_input(path, max_bytes=max_bytes) as file:
        try:
            data = file.read(max_bytes + 1)
        except OSError as error:
            raise InputFileError(path, f"cannot be read ({os_reason(error)})") from error
    if len(data) > max_bytes:  # it grew, or the file system states no size
        raise InputFileError(path, _too_large(max_bytes))
    return data


def read_text(path: AnyPath, *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    data = read_bytes(path, max_bytes=max_bytes)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputFileError(path, f"is not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_json(path: AnyPath, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    text = read_text(path, max_bytes=max_bytes)
    return _parsed(path, "JSON", lambda: parse_json(text))


def read_toml(path: AnyPath, *, parse_float: Callable[[str], Any] = float) -> dict[str, Any]:
    text = read_text(path, max_bytes=MAX_TOML_BYTES)
    table: dict[str, Any] = _parsed(path, "TOML", lambda: parse_toml(text, parse_float=parse_float))
    return table


def _parsed(path: AnyPath, form: str, parse: Callable[[], Any]) -> Any:
    try:
        return parse()
    except ValueError as error:
        raise InputFileError(path, f"is not valid {form} ({_lower_first(str(error))})") from error


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def parse_json(text: str | bytes | bytearray) -> Any:
    """Parse JSON of limited depth and numbers. Raises ValueError."""
    return _limited(lambda: json.loads(text))


def parse_toml(text: str, *, parse_float: Callable[[str], Any] = float) -> dict[str, Any]:
    """Parse TOML of limited depth and numbers. Raises ValueError."""
    if _DOTTED_KEY.search(text):  # tomllib takes the square of its parts, which is hours
        raise ValueError(TOO_DEEP)
    table: dict[str, Any] = _limited(lambda: tomllib.loads(text, parse_float=parse_float))
    return table


def _limited(parse: Callable[[], Any]) -> Any:
    try:
        value = parse()
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # Python converts at most 4,300 digits
        raise ValueError(TOO_LONG) from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        is_nested = False
        for item in level:
            kind = type(item)
            if kind is int and not -MAX_INTEGER < item < MAX_INTEGER:
                raise ValueError(TOO_LONG)
            if kind is dict or kind is list:
                is_nested = True
                below.extend(item.values() if kind is dict else item)
        if not is_nested:
            return value
        level = below
    raise ValueError(TOO_DEEP)


def plain_name(name: str) -> bool:
    """Whether a name from a file names a file of the same directory."""
    return name not in ("", ".", "..") and "\0" not in name and Path(name).name == name
