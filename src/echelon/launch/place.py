"""Where the launcher of this machine keeps what its ranks leave behind: it reads that when they are gone."""

from __future__ import annotations

from pathlib import Path

FAULTS = "faults"
"""the part of the folder in which ranks say what they do"""

_folder: Path | None = None


def folder() -> Path | None:
    """In a rank that `local.start` started: the launcher's folder. None in any other process."""
    return _folder


def use(path: Path) -> None:
    global _folder
    _folder = path
