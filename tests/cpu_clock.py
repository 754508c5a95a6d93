"""Times on a machine that others use too: CPU time, which they hardly change, and time-outs that grow with them."""

from __future__ import annotations

import os
import time

ALWAYS = 300.0
"""seconds after which something that should have happened did not; it happens much sooner, however busy the machine"""


def cpu_seconds() -> float:
    """Of this process, and of the processes that it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def patient(seconds: float) -> float:
    """A time-out that is this on an idle machine, and longer by twice what others delay this process now."""
    return seconds * max(1.0, 2 * _crowding() - 1)


def _crowding() -> float:
    """How many times longer work takes than its CPU time: 1 on an idle machine."""
    wall, cpu = time.perf_counter(), time.process_time()
    while time.process_time() - cpu < 0.1:
        pass
    return (time.perf_counter() - wall) / (time.process_time() - cpu)
