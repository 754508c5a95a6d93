"""Where the launcher of this machine keeps what its ranks leave behind: it reads that when they are gone."""

from __future__ import annotations

from pathlib import Path

FAULTS = "faults"
"""the part of the folder in which ranks say what they do"""
STOP = "stop wanted"
"""the name of the word that ranks shall save and stop: in a file of that part, or in the process group's store"""

_folder: Path | None = None


def folder() -> Path | None:
    """In a rank that `local.start` started: the launcher's folder. None in any other process."""
    return _folder


def use(path: Path) -> None:
    global _folder
    _folder = path


def of_attempt(root: Path, number: int) -> Path:
    """What ranks of one attempt leave is kept apart: those of the next one start from nothing."""
    return root / f"attempt{number}"


def want_stop(folder: Path) -> None:
    """As faults/state_store.py writes words into files."""
    (folder / FAULTS).mkdir(parents=True, exist_ok=True)
    (folder / FAULTS / f"{STOP}.txt").write_text("SIGTERM", encoding="utf-8")
