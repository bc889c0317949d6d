"""Arithmetic on the CPU behind one interface: native C11 where it was built, PyTorch otherwise."""

from __future__ import annotations

from perilune.kernels.interface import Kernels
from perilune.kernels.reference import ReferenceKernels


def load(threads: int) -> Kernels:
    """Choose the kernels of this process, once. `threads` is how many OpenMP threads native calls use."""
    del threads
    return ReferenceKernels("native code isn't built: run `make setup`")
