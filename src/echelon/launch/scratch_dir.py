"""Where the launcher of this machine keeps what its ranks leave behind: it reads that when they are gone."""

from __future__ import annotations

from pathlib import Path

FAULTS_DIR = "faults"
"""the part of the folder in which ranks say what they do"""
STOP_KEY = "stop wanted"
"""the name of the word that ranks shall save and stop: in a file of that part, or in the process group's store"""

_scratch_dir: Path | None = None


def scratch_dir() -> Path | None:
    """In a rank that `local.start` started: the launcher's folder. None in any other process."""
    return _scratch_dir


def set_scratch_dir(path: Path) -> None:
    global _folder
    _scratch_dir = path


def attempt_dir(root: Path, attempt: int) -> Path:
    """What ranks of one attempt leave is kept apart: those of the next one start from nothing."""
    return root / f"attempt{attempt}"


def request_stop(folder: Path) -> None:
    """As faults/state_store.py writes words into files."""
    (folder / FAULTS_DIR).mkdir(parents=True, exist_ok=True)
    (folder / FAULTS_DIR / f"{STOP_KEY}.txt").write_text("SIGTERM", encoding="utf-8")
