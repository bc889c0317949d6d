"""The machine under a bench: what it is, how fast it is right now, and who else is using it.

Calibration readings (bf16 GEMM and memory read) taken in the same run let a reading from another day be compared
after normalising. The accounting of foreign load tells a quiet run from a noisy one.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the machine gave: bf16 matrix product and memory read, both with the bench's threads."""

    gemm_gflops: float
    read_gb_s: float


def describe() -> dict[str, object]:
    """What a reader needs to judge a reading; no names, no paths."""
    cores = len(os.sched_getaffinity(0))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "isa": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni") if flag in _cpu_flags()],
        "cores": cores,
        "memory_gib": round(memory_bytes / 1024**3, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _cpu_field(name: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux: the platform module's word has to do
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _cpu_name() -> str:
    return _cpu_field("model name") or platform.processor() or platform.machine()


def _cpu_flags() -> set[str]:
    return set(_cpu_field("flags").split())


@dataclass(frozen=True, slots=True)
class CpuClock:
    """CPU seconds at one moment: of the whole machine, and of some processes with their threads and children."""

    wall_s: float
    machine_s: float
    own_s: float

    @classmethod
    def now(cls, pids: Iterable[int]) -> CpuClock:
        own = sum(process_cpu_s(pid) for pid in pids)
        return cls(time.perf_counter(), _machine_cpu_s(), own)

    def foreign_share(self, earlier: CpuClock) -> float:
        """Share of the machine's cores that others kept busy since `earlier`, in [0, 1]."""
        wall_s = self.wall_s - earlier.wall_s
        others_s = (self.machine_s - earlier.machine_s) - (self.own_s - earlier.own_s)
        cores = os.cpu_count() or 1
        return min(1.0, max(0.0, others_s / (wall_s * cores))) if wall_s > 0 else 0.0


def _machine_cpu_s() -> float:
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def process_cpu_s(pid: int) -> float:
    """User and system seconds of a process and its descendants, living or waited for; 0 for one that is gone."""
    total = 0.0
    for member in _family(pid):
        try:
            stat = Path(f"/proc/{member}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:  # it ended between listing and reading
            continue
        fields = stat.rpartition(")")[2].split()
        total += sum(int(field) for field in fields[11:15]) / _TICKS_PER_S  # own, then dead children's
    return total


def _family(pid: int) -> list[int]:
    members = [pid]
    for member in members:
        try:
            tasks = list(Path(f"/proc/{member}/task").iterdir())
            for task in tasks:
                members += [int(child) for child in (task / "children").read_text().split()]
        except OSError:  # it ended meanwhile
            continue
    return members


def calibrate(threads: int, seconds: float = 0.5) -> Calibration:
    """Measure now, about `seconds` for each figure. Imports torch; call it in a worker."""
    import torch

    torch.set_num_threads(threads)
    return Calibration(gemm_gflops=_gemm_gflops(seconds), read_gb_s=_read_gb_s(seconds))


def _gemm_gflops(seconds: float) -> float:
    import torch

    size = 2048
    left = torch.randn(size, size).bfloat16()
    right = torch.randn(size, size).bfloat16()
    torch.mm(left, right)
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def _read_gb_s(seconds: float) -> float:
    """A sum over 512 MiB: far more than any cache of these machines, one pass of pure reads."""
    import torch

    data = torch.ones(64 * 1024**2, dtype=torch.float64)
    data.sum()
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.numel() * data.element_size() / best / 1e9
