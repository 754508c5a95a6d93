"""Scratch folders of killed processes are removed by the next one; those in use are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

from echelon.launch.scratch_dir import LOCK_FILE, ScratchFolder, remove_abandoned_folders

OWNER = """
import os, signal
from echelon.launch.scratch_dir import ScratchFolder
folder = ScratchFolder("ranks")
(folder.path / "file").write_text("text")
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", OWNER], env=env, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = tmp_path.iterdir()
    assert str(left) == killed.stdout.strip()
    others = [tmp_path / "echelon-other", tmp_path / "theirs-1"]  # being created, or not ours
    for other in others:
        other.mkdir()
    (others[1] / LOCK_FILE).touch()
    with ScratchFolder("ranks") as mine, ScratchFolder("pool") as too:
        assert sorted(tmp_path.iterdir()) == sorted([mine.path, too.path, *others])
        (mine.path / "deep").mkdir()
        remove_abandoned_folders()
        assert mine.path.is_dir()
        assert too.path.is_dir()
    assert sorted(tmp_path.iterdir()) == others


def test_a_folder_is_removed_with_its_owner(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = ScratchFolder("verify")
    del folder
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_no_file_of_ours_is_left_alone(tmp_path, monkeypatch):
    """Opening a FIFO waits for its other end: anyone could stop every start in a shared temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = [tmp_path / "echelon-fifo", tmp_path / "echelon-link"]
    for folder in folders:
        folder.mkdir()
    os.mkfifo(folders[0] / LOCK_FILE)
    (tmp_path / "target").touch()
    (folders[1] / LOCK_FILE).symlink_to(tmp_path / "target")
    remove_abandoned_folders()
    assert all(folder.is_dir() for folder in folders)
