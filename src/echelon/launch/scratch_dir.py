"""The local launcher's scratch directory, where ranks leave files that the launcher reads when they are gone."""

from __future__ import annotations

from pathlib import Path

FAULTS_DIR = "faults"
"""its subdirectory for the state store of faults/"""
STOP_KEY = "stop wanted"
"""the key of a request to stop, in the state store"""

_scratch_dir: Path | None = None


def scratch_dir() -> Path | None:
    """The launcher's scratch directory, in a rank that `launch_ranks` started; None in any other process."""
    return _scratch_dir


def set_scratch_dir(path: Path) -> None:
    global _scratch_dir
    _scratch_dir = path


def attempt_dir(root: Path, attempt: int) -> Path:
    """The directory of one attempt; the next attempt starts with an empty one."""
    return root / f"attempt{attempt}"


def request_stop(folder: Path) -> None:
    """Request a graceful stop, in the format of faults/state_store.py."""
    (folder / FAULTS_DIR).mkdir(parents=True, exist_ok=True)
    (folder / FAULTS_DIR / f"{STOP_KEY}.txt").write_text("SIGTERM", encoding="utf-8")
