"""A tensor as a model file stores it, and how to turn it into numbers.

Knows number formats: plain floats and GGUF block quantisation. Knows neither file formats nor models.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from perilune.errors import UnsupportedModel

Bytes2D = NDArray[np.uint8]

FLOAT_KINDS = {"F32": (torch.float32, 4), "F16": (torch.float16, 2), "BF16": (torch.bfloat16, 2)}

# kind -> (columns, bytes) of one quantisation block. Source: ggml's ggml-common.h.
BLOCK_KINDS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
SUPPORTED_KINDS = (*FLOAT_KINDS, *BLOCK_KINDS)


def row_bytes(kind: str, cols: int) -> int:
    """Bytes of one row of `cols` numbers. Raises `UnsupportedModel` for a ragged last block."""
    if kind in FLOAT_KINDS:
        return cols * FLOAT_KINDS[kind][1]
    block_cols, block_bytes = BLOCK_KINDS[kind]
    if cols % block_cols:
        raise UnsupportedModel(
            f"A {kind} tensor has rows of {cols} numbers, which {kind} can't store (it packs {block_cols}).",
            hint="The file is damaged; download it again.",
        )
    return cols // block_cols * block_bytes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A matrix [rows, cols] (a vector has one row) in the bytes of its file: `raw` is uint8 [rows, row bytes]."""

    name: str
    kind: str
    rows: int
    cols: int
    raw: Bytes2D

    @property
    def elements(self) -> int:
        return self.rows * self.cols

    def take_rows(self, order: NDArray[np.int64]) -> StoredTensor:
        """The same tensor with its rows reordered; quantisation blocks lie within rows, so this is exact."""
        return replace(self, rows=len(order), raw=self.raw[order])

    def raw_tensor(self) -> torch.Tensor:
        """`raw` as a tensor that shares its memory where the file's mapping allows it."""
        return _as_tensor(self.raw)

    def float32(self) -> torch.Tensor:
        """Exact values, fp32 [rows, cols]."""
        if self.kind in FLOAT_KINDS:
            dtype, _ = FLOAT_KINDS[self.kind]
            return _as_tensor(self.raw).view(dtype).reshape(self.rows, self.cols).float()
        from gguf import GGMLQuantizationType, dequantize

        values = dequantize(np.ascontiguousarray(self.raw), GGMLQuantizationType[self.kind])
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(self.rows, self.cols)

    def vector(self) -> torch.Tensor:
        """Exact values, fp32 [elements]."""
        return self.float32().reshape(-1).clone()


def _as_tensor(raw: Bytes2D) -> torch.Tensor:
    with warnings.catch_warnings():
        # Mappings are read-only and torch warns that writing to them would fail; nothing here writes.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.ascontiguousarray(raw))


class TensorSource(Protocol):
    """An opened model file or folder."""

    @property
    def names(self) -> Sequence[str]: ...

    def tensor(self, name: str) -> StoredTensor:
        """Raises `UnsupportedModel` when the file lacks it."""
        ...

    def close(self) -> None: ...
