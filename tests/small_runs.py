"""The configuration of runs that take a second, for tests of whole runs."""

from __future__ import annotations

import json
from pathlib import Path

from echelon.config.run_config import Config

NUMBERS = "".join(f"{n} and {n * n}; " for n in range(3000))


def small(folder: Path, layout: str, *, name: str = "run", text: str = NUMBERS, **changes: object) -> Config:
    """Of a run in `folder/name`, on a text that is written there."""
    path = folder / "text.txt"
    if not path.exists():
        path.write_text(text)
    settings = {
        "data.path": json.dumps([str(path)]),
        "seq_len": 16,
        "batch": 4,
        "layout": layout,
        "eval.every": 0,
        "sample.tokens": 0,
        "device": "cpu",
        "run": str(folder / name),
        **changes,
    }
    return Config.load(None, [f"{key}={value}" for key, value in settings.items()])
