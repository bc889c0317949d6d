"""Large anonymous memory for tensors: zeroed, page-aligned, in huge pages where the system grants them."""

from __future__ import annotations

import mmap

import torch

_HUGE_BYTES = 2 << 20


def zeroed_bytes(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], zero; RAM is taken page by page at the first write. Raises OSError if it can't map."""
    region = mmap.mmap(-1, max(num_bytes, 1) + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)  # holds the mapping alive
    offset = -whole.data_ptr() % _HUGE_BYTES
    return whole[offset : offset + num_bytes]
