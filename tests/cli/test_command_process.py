"""The process of a command: bad streams, interrupts and threads that outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from echelon.cli import command_process
from echelon.launch import process_end

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def echelon(*args: str, before: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    """The command in a new process, after the Python statements `before`."""
    code = f"import sys; sys.argv = ['echelon', *{args!r}]\n{before}\nfrom echelon.cli import main; main()"
    settings = {"env": ENV, "text": True, "stderr": subprocess.PIPE, "check": False, **options}
    return subprocess.run([sys.executable, "-c", code], **settings)


def test_a_full_standard_output_is_one_sentence():
    with open("/dev/full", "w") as full:
        ended = echelon("draw", "--json", stdout=full)
    assert ended.returncode == 1
    assert ended.stderr == (
        "echelon: standard output cannot be written (no space left on device); give it another file\n"
    )


def test_closed_streams_are_opened_to_nowhere():
    closing = "import os; os.close(1); os.close(2); sys.stdout = sys.stderr = None"
    ended = echelon("draw", before=closing, stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_an_interrupt_while_commands_are_imported(tmp_path: Path):
    (tmp_path / "typer.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT); print('here')")
    # A shell's background job ignores interrupts, and what it starts inherits that.
    handled = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    before = f"{handled}; sys.path.insert(0, {str(tmp_path)!r})"
    ended = echelon("draw", before=before, stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGINT, "", "")


def test_interrupts_while_a_command_ends_are_ignored_for_a_while(monkeypatch):
    handler = command_process._Interrupt()
    with pytest.raises(KeyboardInterrupt):
        handler(signal.SIGINT, None)
    handler(signal.SIGINT, None)
    monkeypatch.setattr(command_process, "IGNORED_S", -1.0)
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    handler(signal.SIGINT, None)
    assert statuses == [130]


def test_a_thread_that_is_not_a_daemon_does_not_keep_the_process(monkeypatch, capsys):
    statuses: list[int] = []
    monkeypatch.setattr(process_end, "GRACE_S", 0.01)
    monkeypatch.setattr(os, "_exit", statuses.append)
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="of the user")
    process_end.end_despite_threads(3)
    thread.start()
    try:
        process_end.end_despite_threads(7)
        deadline = time.monotonic() + 60
        while not statuses and time.monotonic() < deadline:
            time.sleep(0.005)
    finally:
        done.set()
        thread.join()
    assert statuses == [7]
    assert "threads are still running (of the user)" in capsys.readouterr().err


def test_a_command_ends_despite_a_thread():
    hang = "import threading; from echelon.launch import process_end; process_end.GRACE_S = 0.1\n"
    hang += "threading.Thread(target=threading.Event().wait, name='endless').start()"
    ended = echelon("draw", before=hang, stdout=subprocess.DEVNULL, timeout=300)
    assert (ended.returncode, "endless" in ended.stderr) == (0, True)
