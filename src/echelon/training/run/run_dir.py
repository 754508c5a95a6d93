"""A run's directory: its configuration, plan, log and results.

runs/gpt-tiny-20250131-120000/
  config.toml    every key that has an effect: `echelon train config.toml` repeats the run
  plan.json      the layout, every resolved setting, and the prediction of the planner
  log.jsonl      one JSON object per line, in order of time (`echelon draw RUN` shows expert loads)
  measured.json  at the end: measured and predicted step time (`echelon plan --correct RUN`)
  checkpoints/   with checkpoint.every: `echelon train --resume RUN` restores the newest
  profile.json   of a pipeline that was partitioned by it: the time of each layer
  timeline.json  of a pipeline: the actions of the last step, planned and measured (`echelon draw RUN`)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from echelon.config.run_config import Config
from echelon.input_file import MAX_JSON_BYTES, MAX_TOML_BYTES, open_input, parse_json, read_json, read_text
from echelon.layout import ValidationError


class RunError(ValueError):
    """A run's directory cannot be created, written or read."""


@dataclass(kw_only=True)
class Run:
    """An open run. Only the process that created it (rank 0) writes.

    >>> run = ec.Run.create(ec.Config(run="runs/example"), plan={})
    >>> run.log("note", text="hello")
    >>> [record["text"] for record in run.records("note")]
    ['hello']
    >>> run.close()
    """

    path: Path
    """The directory."""
    _log: IO[str] | None = field(default=None, repr=False)
    _lock_file: IO[bytes] | None = field(default=None, repr=False)

    @classmethod
    def create(cls, config: Config, plan: Mapping[str, Any]) -> Self:
        """Create a new directory; if the name is taken, with the suffix -2, -3, …"""
        wanted = default_run_path(config)
        for number in itertools.count(1):
            path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
            try:
                path.mkdir(parents=True, exist_ok=True)
                if any(path.iterdir()):
                    continue
                # Exclusive creation of the file claims the directory when two runs start at once.
                with open(path / "config.toml", "x", encoding="utf-8") as file:
                    file.write(config.to_toml())
            except FileExistsError as error:
                if path.is_dir():
                    continue
                raise RunError(f"the run's directory is a file ({path}); set run to another folder") from error
            except OSError as error:
                raise _write_error(path, error) from error
            run = cls(path=path)
            run.write("plan.json", json.dumps(_json_safe(plan), indent=2, ensure_ascii=False) + "\n")
            run.write("log.jsonl", "")
            return run
        raise AssertionError("unreachable: the numbers do not end")

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open an existing run, to read it or to append to its log."""
        path = Path(path)
        missing = [name for name in ("config.toml", "plan.json", "log.jsonl") if not (path / name).is_file()]
        if missing:
            raise RunError(
                f"not a run's directory ({path} has no {', '.join(missing)}); give the folder that train printed"
            )
        return cls(path=path)

    def lock(self) -> bool:
        """Lock the run until this process closes it or ends; return False where another process holds the lock."""
        self._lock_file = open(self.path / "config.toml", "rb")  # noqa: SIM115 (close() does)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without locks
        return True

    @property
    def seconds_since_log(self) -> float:
        return time.time() - (self.path / "log.jsonl").stat().st_mtime

    @property
    def config(self) -> Config:
        try:
            return Config.from_toml(read_text(self.path / "config.toml", max_bytes=MAX_TOML_BYTES))
        except ValidationError:
            raise
        except ValueError as error:
            raise RunError(f"damaged configuration ({self.path / 'config.toml'}: {error}); start a new run") from error

    @property
    def plan(self) -> dict[str, Any]:
        plan = read_json(self.path / "plan.json")
        if not isinstance(plan, dict) or not isinstance(plan.get("layout"), str):
            raise RunError(f"damaged plan ({self.path / 'plan.json'} has no layout); start a new run")
        return plan

    def log(self, kind: str, **values: Any) -> None:
        """Append one line. Numbers that JSON lacks become the texts "nan", "inf" and "-inf", which `float` reads."""
        line = json.dumps(_json_safe({"kind": kind, **values}), ensure_ascii=False, separators=(", ", ": "))
        try:
            if self._log is None:
                self._log = _open_to_append(self.path / "log.jsonl")
            self._log.write(line + "\n")
            self._log.flush()
            if not os.fstat(self._log.fileno()).st_nlink:  # what follows would be written to a file without a name
                raise FileNotFoundError(errno.ENOENT, "the file was removed while the run was training")
        except OSError as error:
            with contextlib.suppress(OSError):  # closing flushes the buffer again, and fails for the same reason
                self._close_log()
            raise _write_error(self.path / "log.jsonl", error) from error

    def records(self, kind: str | None = None, *, complete: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the log records of one kind, or all; skip a torn last line (a crash, or a write in progress).

        Raises RunError for a line that is no record; with `complete` also for a record without its RECORD_FIELDS.
        """
        with open_input(self.path / "log.jsonl") as file:
            number = 0
            while (line := file.readline(MAX_JSON_BYTES)).endswith(b"\n"):
                number += 1
                try:
                    record = _checked_record(parse_json(line.decode(errors="replace")), complete)
                except ValueError as error:
                    where = f"{self.path / 'log.jsonl'}, line {number}"
                    raise RunError(f"damaged log ({where}: {error}); remove the line, or start a new run") from error
                if kind is None or record["kind"] == kind:
                    yield record
            if len(line) == MAX_JSON_BYTES:
                raise RunError(f"damaged log ({self.path / 'log.jsonl'}, line {number + 1} is too long)")

    def close(self) -> None:
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None
        self._close_log()

    def _close_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, name: str, text: str) -> None:
        try:
            (self.path / name).write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise _write_error(self.path / name, error) from error


NUMBER = int | float
RECORD_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "start": {"time": NUMBER, "after": int},
    "rollback": {"after": int},
    "step": {"step": int, "skipped": bool, "seconds": NUMBER | None, "waiting": NUMBER | None, "data": NUMBER | None},
    "resume": {"layout": str},
    "checkpoint": {"path": str},
    "diagnosis": {"ranks": list, "text": str},
    "stopped": {"signal": str, "step": int},
}
"""the fields of log records that later attempts read, with their types"""


def _checked_record(record: Any, complete: bool) -> dict[str, Any]:
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise ValueError("no object with a kind")
    for name, types in RECORD_FIELDS.get(record["kind"], {}).items() if complete else ():
        if not isinstance(record.get(name), types):
            raise ValueError(f"a record of kind {record['kind']} has no valid {name}")
    return record


def _open_to_append(path: Path) -> IO[str]:
    """Open the log at its end, without the incomplete line that a crash may have left."""
    with open(path, "r+b") as file:
        file.truncate(_end_of_last_line(file))
    # Half of a surrogate pair cannot be written as UTF-8, but its escape is JSON.
    return open(path, "a", encoding="utf-8", errors="backslashreplace")


def _end_of_last_line(file: IO[bytes], chunk: int = 1 << 16) -> int:
    position = file.seek(0, 2)
    while position:
        start = max(0, position - chunk)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0


def _json_safe(value: Any) -> Any:
    """Return `value` with floats that JSON lacks as strings."""
    if isinstance(value, int | str):
        return value  # most of a long list
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _json_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return value


def default_run_path(config: Config) -> Path:
    """Return the directory of a run that starts now, before suffixes."""
    model = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in Path(config.model).name)
    return Path(config.run or f"runs/{model}-{time.strftime('%Y%m%d-%H%M%S')}")


def _write_error(path: Path, error: OSError) -> RunError:
    reason = (error.strerror or str(error)).lower()
    return RunError(f"cannot write the run ({path}: {reason}); free disk space, or set run to another folder")
