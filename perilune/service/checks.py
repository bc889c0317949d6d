"""Findings about this machine that `perilune doctor` and a running server share: kernels, disk.

Knows settings and the system, no model. A warning costs speed or room, a failure costs the answer.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from perilune.config import Settings
from perilune.runtime.memory import human_bytes

BASE_BYTES = 500 * 1024**2
"""What Python, torch and one step's activations take beside weights and KV (measured: 380-450 MB)."""

ROOM_BYTES = 1024**3

State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `fix` is a command line, or empty."""

    name: str
    state: State
    detail: str
    fix: str = ""


def kernels_check(described: str) -> Check:
    """Of the kernels that this process runs, by their own description."""
    if not described.startswith("PyTorch reference"):
        return Check("kernels", "ok", described)
    fix = f"{sys.executable} -m perilune.kernels.build"
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        return Check(
            "kernels", "warning", f"{described}; no C compiler is installed.", f"apt-get install gcc && {fix}"
        )
    return Check("kernels", "warning", f"{described}: slower by several times.", fix)


def disk_check(settings: Settings, cold_bytes: int) -> Check:
    """`cold_bytes` are taken when serving starts; the quota of KV is filled as documents come."""
    folder = settings.home if settings.home.is_dir() else Path(tempfile.gettempdir())
    free = shutil.disk_usage(folder).free
    quota = settings.kv_cache.disk_quota
    detail = f"{human_bytes(free)} free, KV may use {human_bytes(quota)}"
    if free < ROOM_BYTES:
        return Check("disk", "failed", f"{detail}; documents need room.", "perilune kv rm --all")
    if cold_bytes > free:
        fix = f"perilune --set kv_cache.spill={free // 2 // 1024**3}G serve"
        return Check("disk", "failed", f"{detail}; the cold tier takes {human_bytes(cold_bytes)} at once.", fix)
    if quota > free:
        fix = f"perilune --set kv_cache.disk_quota={free // 2 // 1024**3 or 1}G serve"
        return Check("disk", "warning", f"{detail}: more than there is.", fix)
    return Check("disk", "ok", detail)
