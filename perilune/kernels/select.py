"""Which kernels this process runs: native C11 where it was built, PyTorch otherwise."""

from __future__ import annotations

from perilune.kernels.interface import Kernels
from perilune.kernels.native import Level, NativeKernels
from perilune.kernels.reference import ReferenceKernels


def load(threads: int, *, level: Level | None = None) -> Kernels:
    """Choose the kernels of this process, once: native if it was built, else the PyTorch reference.

    `threads` is how many OpenMP threads native calls use; `level` asks for a lower CPU level than the best.
    """
    from perilune.kernels.build import library_path  # at call time, so that `-m perilune.kernels.build` runs clean

    library = library_path()
    if not library.exists():
        return ReferenceKernels("native code isn't built: run `make setup` with gcc installed")
    try:
        return NativeKernels(library, threads, level or "avx512")
    except OSError as error:
        return ReferenceKernels(f"native code doesn't load: {error}")
