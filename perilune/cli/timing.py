"""How long this process has lived, by the kernel's clock: `ask` is timed from the moment it was started."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

_IMPORTED_S = time.monotonic()


def process_age_s() -> float:
    """Seconds since this process was started; on systems without /proc, since this module was loaded."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED_S


@dataclass(slots=True)
class Milestones:
    """Named moments, in seconds from process start. The first mark of a name counts."""

    at_s: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str) -> float:
        return self.at_s.setdefault(name, round(process_age_s(), 3))
