"""The host's memory: what this process has of it, and how full it is. For the guess why a rank was killed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

OOM_SHARE = 0.9
"""the share of the limit from which on a SIGKILL is probably the system's, for want of memory"""
CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes."""

    rank_bytes: int = 0
    used_bytes: int = 0
    limit_bytes: int = 0

    @property
    def used_share(self) -> float:
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 0.0

    def __str__(self) -> str:
        return f"{_format_bytes(self.rank_bytes)} in the rank, {_format_bytes(self.used_bytes)} of {_format_bytes(self.limit_bytes)} on its host"


def read_host_memory() -> HostMemory:
    """Of this process and its host, or of the container that it is in; zeros where the system does not say."""
    used, limit = _read_meminfo()
    for most, now in CGROUP_FILES:
        bound, taken = _read_int(most), _read_int(now)
        if 0 < bound < (limit or bound + 1):
            # What a container has read from disk counts as its own until it is needed.
            limit, used = bound, max(0, taken - _cgroup_cache_bytes())
    return HostMemory(rank_bytes=_resident_bytes(), used_bytes=used, limit_bytes=limit)


def _read_meminfo() -> tuple[int, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0, 0
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) > 1}
    total = found.get("MemTotal", 0)
    return total - found.get("MemAvailable", total), total


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _read_int(path: str) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return 0


def _cgroup_cache_bytes() -> int:
    for path in ("/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory/memory.stat"):
        try:
            rows = dict(line.split() for line in Path(path).read_text().splitlines())
        except (OSError, ValueError):
            continue
        return int(rows.get("total_inactive_file", rows.get("inactive_file", "0")))
    return 0


def _format_bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.0f} MiB"
