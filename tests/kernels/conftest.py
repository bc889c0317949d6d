"""Kernels by CPU level, and random batches over a shuffled block pool."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from perilune.kernels.build import library_path, main
from perilune.kernels.native import Level, NativeKernels
from perilune.kernels.reference import ReferenceKernels
from perilune.kernels.select import load

LEVEL_NAMES: dict[Level, str] = {"avx512": "AVX-512", "avx2": "AVX2", "portable": "portable"}


@pytest.fixture(scope="session", params=["avx512", "avx2", "portable"])
def native(request: pytest.FixtureRequest) -> NativeKernels:
    if not library_path().exists():
        if shutil.which("gcc") is None:
            pytest.skip("no compiler, so no native kernels")
        assert main() == 0
    kernels = load(2, level=request.param)
    assert isinstance(kernels, NativeKernels), kernels.describe()
    if LEVEL_NAMES[request.param] not in kernels.level_name:
        pytest.skip(f"this CPU has no {request.param}")
    return kernels


@pytest.fixture(scope="session")
def reference() -> ReferenceKernels:
    return ReferenceKernels("asked for by a test")


@pytest.fixture(autouse=True)
def _same_numbers_and_few_threads() -> Iterator[None]:
    """Seeded, and torch on one thread: its pool on a busy machine makes small operations slow."""
    before = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
