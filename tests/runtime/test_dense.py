"""Prefill's matrices: prepacked products are torch's own, and a row's bits don't depend on its neighbours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from perilune.core import BLOCK_TOKENS
from perilune.runtime.dense import DenseMatrix
from perilune.runtime.mri import SequenceSlice
from perilune.runtime.torch_runtime import _passes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "cols"), [(960, 576), (576, 1536), (48, 80)])
@pytest.mark.parametrize("bias", [False, True])
def test_product(dtype: torch.dtype, rows: int, cols: int, bias: bool) -> None:
    weight, extra = torch.randn(rows, cols).to(dtype), torch.randn(rows).to(dtype) if bias else None
    x = torch.randn(300, cols).to(dtype)
    matrix = DenseMatrix(weight)
    assert (matrix.rows, matrix.cols, matrix.dtype, matrix.nbytes) == (rows, cols, dtype, weight.nbytes)
    torch.testing.assert_close(matrix(x, extra), linear(x, weight, extra), rtol=2**-7, atol=1e-3)


def test_a_row_does_not_depend_on_how_many_there_are() -> None:
    matrix = DenseMatrix(torch.randn(960, 576).bfloat16())
    x = torch.randn(1056, 576).bfloat16()
    whole = matrix(x)
    for start, count in ((0, 2), (7, 1), (31, 33), (64, 512), (100, 831)):
        assert torch.equal(matrix(x[start : start + count]), whole[start : start + count]), (start, count)


MANY_LENGTHS = """
import re, torch
from pathlib import Path
from perilune.runtime.dense import DenseMatrix

def resident_bytes():
    return 1024 * int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
with torch.inference_mode():
    plain = DenseMatrix(torch.randn(576, 576).bfloat16())
    wide = DenseMatrix(torch.randn(1536, 576).bfloat16())
    x = torch.randn(600, 576).bfloat16()
    samples = []
    for rows in (*range(300, 350), *range(2, 302)):
        plain(x[:rows]), wide(x[:rows])
        samples.append(resident_bytes())
    print(samples[-1] - samples[49])
"""
MANY_LENGTHS_BYTES = 60 << 20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_does_not_grow_with_the_lengths_seen() -> None:
    """Libraries keep what they compiled for each number of rows; in a process of its own, because they decide at
    the first product how many."""
    if not DenseMatrix(torch.zeros(8, 8).bfloat16())._packed:
        pytest.skip("this CPU or build doesn't prepack")
    done = subprocess.run([sys.executable, "-c", MANY_LENGTHS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MANY_LENGTHS_BYTES, f"{int(done.stdout) >> 20} MiB"


@pytest.mark.parametrize("lengths", [(5,), (1024,), (1170,), (2048,), (3000, 1, 77)])
def test_passes_are_equal_and_complete(lengths: tuple[int, ...]) -> None:
    rows, total = 800, sum(lengths)
    slices = [SequenceSlice(str(n), [0] * n, 0, [], True) for n in lengths]
    passes = list(_passes(slices, rows))
    sizes = [sum(piece.count for piece in pieces) for pieces in passes]
    assert sum(sizes) == total
    assert max(sizes) <= 1.5 * rows + BLOCK_TOKENS
    assert max(sizes) - min(sizes) <= BLOCK_TOKENS * len(sizes)
    for piece in slices:
        parts = [part for pieces in passes for part in pieces if part.slice is piece]
        assert [part.offset for part in parts] == [sum(p.count for p in parts[:i]) for i in range(len(parts))]
        assert [part.sample for part in parts] == [False] * (len(parts) - 1) + [True]
