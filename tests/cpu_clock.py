"""How long something takes of a CPU, which other processes of a busy machine do not change."""

from __future__ import annotations

import os


def cpu_seconds() -> float:
    """Of this process, and of the processes that it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
