"""Large anonymous memory for tensors: zeroed, aligned, in huge pages where the system grants them.

Huge pages are worth a quarter of a decode step here: it reads every weight once, and 4 KiB pages miss the TLB.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

_HUGE_BYTES = 2 << 20
_ARENA_BYTES = 32 << 20
_ALIGNMENT_BYTES = 64
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it


def zeroed_bytes(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], zero; RAM is taken page by page at the first write. Raises OSError if it can't map."""
    region = mmap.mmap(-1, max(num_bytes, 1) + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)  # holds the mapping alive
    offset = -whole.data_ptr() % _HUGE_BYTES
    return whole[offset : offset + num_bytes]


def populate(data: torch.Tensor) -> bool:
    """Have the system give the RAM behind `data` (from `zeroed_bytes`) now, its content unchanged.

    The first write to a page costs up to 1.3 ms per MB on a virtual machine: a good part of restoring a
    document's KV. False where the system can't; the pages then come at their first write.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(libc.madvise(data.data_ptr(), data.numel(), _MADV_POPULATE_WRITE) == 0)


class Arena:
    """Hands out pieces of large mappings, so that small weights share huge pages.

    A mapping lives as long as any of its pieces.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], zero, at a cache line's start. Raises OSError as `zeroed_bytes`."""
        rounded = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if rounded > self._free.numel():
            if rounded > _ARENA_BYTES // 2:
                return zeroed_bytes(num_bytes)
            self._free = zeroed_bytes(_ARENA_BYTES)
        piece, self._free = self._free[:num_bytes], self._free[rounded:]
        return piece
