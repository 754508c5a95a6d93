"""A line in a run's log from outside the loop: who writes it may be another rank, or the launcher."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

DIAGNOSIS_EVENT, INJECTED_EVENT = "diagnosis", "injected"


def append_event(run: Path, fields: dict[str, Any], kind: str = DIAGNOSIS_EVENT) -> bool:
    """Appends one line, if the log is on this machine. Whole lines: the log's owner may be writing too."""
    log = run / "log.jsonl"
    if not log.is_file():
        return False
    line = json.dumps({"kind": kind, "time": time.time(), **fields}, ensure_ascii=False, separators=(", ", ": ")) + "\n"
    with open(log, "ab", buffering=0) as file:
        file.write(line.encode("utf-8", "backslashreplace"))
    return True
