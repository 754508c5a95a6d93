"""Hostile input ends in sentences on standard error: no traceback, no hang, nothing written elsewhere, nothing lost.

`make soak` runs a thousand cases, the default suite some of each kind. A case is reproduced by its seed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from hostile_inputs import MAKERS, Samples, hostile_case

CPU_LIMIT_S, WALL_LIMIT_S = 20.0, 300.0
"""the second for a case that waits: its limit leaves room for a loaded machine"""
NUM_CASES, SAMPLE = 1000, 4 * len(MAKERS)
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree")


class AcceptedError(Exception):
    """The input is valid: the rest of the command would only take time."""


class Hang(BaseException):
    """Not an Exception, which the command might catch."""


class WriteGuard:
    """Records what this process changes outside of the allowed folder."""

    def __init__(self) -> None:
        self.allowed: Path | None = None
        self.outside: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.allowed is None or not (event == "open" or event in CHANGES):
            return
        paths = args[:2] if event in ("os.rename", "os.link", "os.symlink") else args[:1]
        if event == "open" and not (isinstance(args[2], int) and args[2] & WRITE_FLAGS):
            return
        for path in paths:
            if isinstance(path, str | bytes | os.PathLike) and self._is_outside(os.fsdecode(path)):
                self.outside.append(f"{event} {os.fsdecode(path)}")

    def _is_outside(self, path: str) -> bool:
        assert self.allowed is not None
        full = os.path.abspath(path)
        return not f"{full}/".startswith((f"{self.allowed}/", "/dev/", "/proc/")) and "__pycache__" not in full


@pytest.fixture(scope="module")
def guard() -> WriteGuard:
    return WriteGuard()


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """A tiny model in both formats, a token file, and a run of two steps with checkpoints."""
    from echelon import models
    from echelon.checkpoint.hf import convert_tensors, native_format, safetensors_writer
    from echelon.data import TokenWriter
    from echelon.models.hf.hf_config_writer import hf_config
    from echelon.models.model_config import ModelConfig
    from echelon.models.model_dir import SavedModel

    folder = tmp_path_factory.mktemp("samples")
    sizes = {"layers": 1, "width": 8, "heads": 2, "kv_heads": 1, "ffn": 16, "vocab": 257, "max_seq_len": 64}
    saved = SavedModel(config=ModelConfig(name="small", family="llama", **sizes), model_type="llama")
    state = {name: convert_tensors.in_memory(x) for name, x in models.build(saved.config).state_dict().items()}
    native, hf = folder / "native", folder / "hf"
    native.mkdir()
    hf.mkdir()
    specs = [safetensors_writer.SafetensorSpec(name, tuple(x.shape), x.dtype) for name, x in state.items()]
    values = ((name, x.read()) for name, x in state.items())
    native_format.write_native_model(native, saved, specs, values, 10**9)
    conversion = convert_tensors.native_to_hf(state, saved.config)
    safetensors_writer.write_safetensors(hf, conversion.specs, conversion.convert())
    (hf / "config.json").write_text(json.dumps(hf_config(saved, "float32")))
    tokens, text = folder / "data.tokens", folder / "text.txt"
    with TokenWriter(tokens, vocab_size=257, eos=256, tokenizer="bytes") as writer:
        for number in range(40):
            writer.write_document([np.arange(50 + number) % 256])
    text.write_text("the quick brown fox " * 100)
    run = folder / "run"
    settings = {
        "model": native,
        "data.path": tokens,
        "seq_len": 16,
        "batch": 2,
        "steps": 2,
        "device": "cpu",
        "run": run,
        "checkpoint.every": 1,
        "eval.every": 0,
        "sample.tokens": 0,
        "spike.action": "warn",
    }
    code, _, stderr = run_command(["train", *(w for k, v in settings.items() for w in ("--set", f"{k}={v}"))])
    assert code == 0, stderr
    return Samples(folder, run, hf, native, tokens, text)


def run_command(args: list[str]) -> tuple[int, str, str]:
    """Run the command in this process: (exit code, stdout, stderr)."""
    from echelon.cli import app

    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            code = app(args, standalone_mode=False) or 0
        except click.ClickException as error:
            error.show(stderr)
            code = error.exit_code
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
    return code, stdout.getvalue(), stderr.getvalue()


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    def stop(number: int, _frame: object) -> None:
        raise Hang(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def accept(*_args: object, **_options: object) -> None:
    raise AcceptedError


def prepare(monkeypatch: pytest.MonkeyPatch, args: list[str], out: Path) -> None:
    """Replace what a valid input starts: ranks, long training, the comparison of logits."""
    from echelon.checkpoint.hf import convert_model
    from echelon.cli import verify
    from echelon.training import loop, task
    from echelon.training.elastic import supervisor

    monkeypatch.chdir(out)
    monkeypatch.setenv("HOME", str(out))
    monkeypatch.setattr(tempfile, "tempdir", str(out))
    if hasattr(task, "TOKEN_CACHE_DIR"):
        monkeypatch.setattr(task, "TOKEN_CACHE_DIR", out / "cache")
    monkeypatch.setattr(supervisor, "supervise", accept)
    monkeypatch.setattr(verify, "_verify", accept)
    monkeypatch.setattr(convert_model, "check_logits", accept)
    if "--resume" not in args and not any(word.startswith("data.path=") for word in args):
        monkeypatch.setattr(loop, "train_on_rank", accept)
    elif "--resume" not in args:
        monkeypatch.setattr(loop.TrainingLoop, "run", read_batches)


def read_batches(training_loop: Any) -> None:
    for microbatch in training_loop.task.microbatches(training_loop.engine, 0):
        assert int(microbatch.inputs["tokens"].max()) < 257
    raise AcceptedError


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    stats = {str(path): path.lstat() for path in folder.rglob("*")}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in stats.items()}


def find_fault(seed: int, folder: Path, samples: Samples, guard: WriteGuard) -> str:
    """Run a case; return what is wrong with how it ended, or an empty text."""
    args = hostile_case(seed, folder, samples)
    out = folder / "out"
    out.mkdir(exist_ok=True)
    before, code, stdout, stderr = contents(folder / "in"), 0, "", ""
    guard.allowed, guard.outside = out.resolve(), []
    try:
        with pytest.MonkeyPatch.context() as monkeypatch, time_limit():
            prepare(monkeypatch, args, out)
            code, stdout, stderr = run_command(args)
    except AcceptedError:
        pass
    except (Exception, Hang):
        return f"seed {seed}: {' '.join(args)[:300]}\n{traceback.format_exc()[-3000:]}"
    finally:
        guard.allowed = None
    faults = [f"wrote outside: {text}" for text in guard.outside]
    faults += ["an input has changed"] if contents(folder / "in") != before else []
    if code and (not stderr.strip() or "Traceback" in stderr):
        faults.append("no sentence on standard error")
    if "--json" in args and (code or stdout):
        try:
            assert isinstance(json.loads(stdout), dict)
        except (ValueError, AssertionError):
            # Options that the command line itself refuses have no JSON.
            faults += [] if "Usage" in stderr else [f"not one JSON object: {stdout[:200]!r}"]
    if any(len(line) > 5000 for line in stderr.splitlines()):
        faults.append("a line of more than 5,000 characters")
    return f"seed {seed}: {' '.join(args)[:300]}\n{faults}\n{stderr[:600]}" if faults else ""


def sweep(seeds: range, tmp_path: Path, samples: Samples, guard: WriteGuard) -> list[str]:
    faults = []
    for seed in seeds:
        folder = tmp_path / str(seed)
        if fault := find_fault(seed, folder, samples, guard):
            faults.append(fault)
    return faults


@pytest.mark.filterwarnings("ignore")
def test_some_hostile_inputs_end_in_sentences(tmp_path: Path, samples: Samples, guard: WriteGuard) -> None:
    assert sweep(range(SAMPLE), tmp_path, samples, guard) == []


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", range(20))
def test_a_thousand_hostile_inputs_end_in_sentences(
    tmp_path: Path, samples: Samples, guard: WriteGuard, block: int
) -> None:
    size = NUM_CASES // 20
    faults = sweep(range(block * size, (block + 1) * size), tmp_path, samples, guard)
    assert faults == [], "\n\n".join(faults)
