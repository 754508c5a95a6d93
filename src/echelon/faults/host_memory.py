"""Host memory of this process and of its node, to tell whether a killed rank ran out of memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

OOM_SHARE = 0.9
"""the share of the memory limit above which the kernel's out-of-memory killer is the likely cause of a SIGKILL"""
CGROUP_FILES = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Resident bytes of the rank, and used bytes of the node or container with its limit."""

    rank_bytes: int = 0
    used_bytes: int = 0
    limit_bytes: int = 0

    @property
    def used_share(self) -> float:
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 0.0

    def __str__(self) -> str:
        rank, used, limit = map(_format_bytes, (self.rank_bytes, self.used_bytes, self.limit_bytes))
        return f"{rank} in the rank, {used} of {limit} on its host"


def read_host_memory() -> HostMemory:
    """Read the memory of this process and of its node or container; zeros where the system does not report it."""
    meminfo = _read_rows("/proc/meminfo")
    limit = 1024 * meminfo.get("MemTotal", 0)
    used = limit - 1024 * meminfo.get("MemAvailable", 0) if "MemAvailable" in meminfo else 0
    for folder, limit_file, usage_file in CGROUP_FILES:
        cgroup_limit, cgroup_used = _read_int(folder / limit_file), _read_int(folder / usage_file)
        if 0 < cgroup_limit < (limit or cgroup_limit + 1):
            # The usage of a container includes its page cache, which the kernel reclaims.
            limit, used = cgroup_limit, max(0, cgroup_used - _cgroup_cache_bytes())
    pages = _read_int("/proc/self/statm", column=1)
    return HostMemory(rank_bytes=pages * os.sysconf("SC_PAGE_SIZE"), used_bytes=used, limit_bytes=limit)


def _cgroup_cache_bytes() -> int:
    for folder, *_ in CGROUP_FILES:
        if rows := _read_rows(folder / "memory.stat"):
            return rows.get("total_inactive_file", rows.get("inactive_file", 0))
    return 0


def _read_rows(path: str | Path) -> dict[str, int]:
    """Read a file of names and numbers."""
    try:
        rows = [line.split() for line in Path(path).read_text().splitlines()]
        return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1}
    except (OSError, ValueError):
        return {}


def _read_int(path: str | Path, column: int = 0) -> int:
    try:
        return int(Path(path).read_text().split()[column])
    except (OSError, ValueError, IndexError):
        return 0


def _format_bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.0f} MiB"
