"""Matrices that prefill multiplies by, kept in the order that oneDNN multiplies them in.

PyTorch's `linear` puts a bf16 weight into oneDNN's own order at every call; here that is done once, at load, and
the plain copy is dropped. Where this build or CPU can't (`_prepacks`), and for fp32, the weight stays as it is.
Knows nothing of models.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import linear

from perilune.kernels.interface import stable_rows

_TYPICAL_ROWS = 512
"""What oneDNN is told of a product's rows when it chooses the order; any number of rows may follow."""


class DenseMatrix:
    """`x @ weight.T + bias`. A row's result doesn't depend on how many rows share the call (see `stable_rows`)."""

    __slots__ = ("_packed", "_weight", "cols", "dtype", "nbytes", "rows")

    def __init__(self, weight: torch.Tensor) -> None:
        self.rows, self.cols = weight.shape
        self.dtype, self.nbytes = weight.dtype, weight.nbytes
        self._packed = weight.dtype == torch.bfloat16 and _prepacks()
        self._weight = _pack(weight) if self._packed else weight

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, cols] -> [T, rows], both in the weight's precision."""
        rows = x.shape[0]
        padded = stable_rows(rows)
        if padded != rows:
            x = torch.cat([x, x.new_zeros(padded - rows, self.cols)])
        product = _multiply(x, self._weight, bias) if self._packed else linear(x, self._weight, bias)
        return product if padded == rows else product[:rows]


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
    return packed


def _multiply(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


@cache
def _prepacks() -> bool:
    """Whether prepacked products work here, by trying one: the operators are torch's own, not public ones."""
    x, weight, bias = (torch.arange(n, dtype=torch.bfloat16) % 7 - 3 for n in (8 * 64, 96 * 64, 96))
    x, weight = x.view(8, 64), weight.view(96, 64)
    try:
        with torch.inference_mode():
            return torch.equal(_multiply(x, _pack(weight), bias), linear(x, weight, bias))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
