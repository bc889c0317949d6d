"""Matrices that prefill multiplies by, kept in the order that oneDNN multiplies them in.

PyTorch's `linear` puts a bf16 weight into oneDNN's own order at every call; here that is done once, at load, and
the plain copy is dropped. Where this build or CPU can't (`_prepacks`), and for fp32, the weight stays as it is.
Knows nothing of models.

oneDNN compiles a kernel for every number of rows it meets and keeps 1,024 of them, PyTorch as many handles: up to
5 MB each for as many lengths as prompts have, 1 GB in all. Here both keep `_CACHED_PRODUCTS`. Compiling one again
costs about 1 ms, once for each kind of matrix and pass.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch.nn.functional import linear

from perilune.kernels.interface import stable_rows

_TYPICAL_ROWS = 512
"""What oneDNN is told of a product's rows when it chooses the order; any number of rows may follow."""

_CACHED_PRODUCTS = 20
"""The five products of a layer for four numbers of rows: the passes of a long prompt are of one or two sizes."""

_CACHE_SETTINGS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


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


def _bound_caches() -> None:
    """Both libraries read these once, at the process's first product; there is no call for it."""
    for name in _CACHE_SETTINGS:
        os.environ.setdefault(name, str(_CACHED_PRODUCTS))


@cache
def _prepacks() -> bool:
    """Whether prepacked products work here, by trying one: the operators are torch's own, not public ones."""
    _bound_caches()
    x, weight, bias = (torch.arange(n, dtype=torch.bfloat16) % 7 - 3 for n in (8 * 64, 96 * 64, 96))
    x, weight = x.view(8, 64), weight.view(96, 64)
    try:
        with torch.inference_mode():
            return torch.equal(_multiply(x, _pack(weight), bias), linear(x, weight, bias))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
