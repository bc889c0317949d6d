"""How much memory this process may still take, and sizes in words."""

from __future__ import annotations

import os
from pathlib import Path

_UNLIMITED = 1 << 60
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """What the system can give without swapping, within a container's limit."""
    return min(_system_bytes(meminfo), _cgroup_bytes(cgroup))


def _system_bytes(meminfo: Path) -> int:
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # macOS has no such figure; half of what is installed is a fair guess there.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_bytes(cgroup: Path) -> int:
    """Version 2 only: version 1 hosts are old enough to run without a limit of ours."""
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if not (limit.is_file() and used.is_file()):
        return _UNLIMITED
    text = limit.read_text().strip()
    if text == "max":
        return _UNLIMITED
    return max(0, int(text) - int(used.read_text()) + _reclaimable_bytes(cgroup / "memory.stat"))


def _reclaimable_bytes(stat: Path) -> int:
    """Cached file pages that nobody used lately: they count as used, and go as soon as memory is wanted."""
    if not stat.is_file():
        return 0
    figures = dict(line.split() for line in stat.read_text().splitlines())
    return int(figures.get("inactive_file", 0))


def human_bytes(size: int | None) -> str:
    """`94 MiB`; powers of 1,024, as sizes are configured."""
    if size is None:
        return "?"
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
