"""The process's OpenMP runtime: exactly one may be mapped, and it is the one that torch brought.

Two runtimes mean two thread pools that fight for the cores. Our library therefore names no runtime itself; its
symbols are resolved from torch's, which `expose` makes visible.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from pathlib import Path

import torch

_RUNTIME = re.compile(r"/lib(g|i)?omp\d*[^/]*\.(so|dylib)[^/]*$")


def mapped_runtimes() -> list[str]:
    """Paths of the OpenMP runtimes in this process, each once; empty where the system doesn't tell."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text(encoding="utf-8").splitlines() if "/" in line}
    return sorted(str(path) for path in {Path(path).resolve() for path in paths if _RUNTIME.search(path)})


def expose() -> str:
    """Make torch's OpenMP symbols visible to libraries loaded later. Returns its path.

    Raises OSError if no runtime is found.
    """
    for path in [*mapped_runtimes(), *_bundled(), ctypes.util.find_library("gomp")]:
        if path:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return path
    raise OSError("no OpenMP runtime found beside torch")


def _bundled() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    return [str(path) for path in sorted(folder.glob("lib*omp*")) if _RUNTIME.search(str(path))]
