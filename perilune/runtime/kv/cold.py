"""COLD: frames for the payloads of closed segments in a file that is mapped, preallocated and has no name.

The system's page cache decides what of it is in RAM, so COLD costs none under pressure. The space is taken at
start: a disk that fills up later can't turn a write to the mapping into a fatal signal. The file is unlinked at
once, so that nothing of a conversation survives the process. Knows numbered frames, not what lies in them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from perilune.errors import Overloaded
from perilune.runtime.kv.warm import FreeFrames, page_aligned

_MADV_POPULATE_READ = 22  # Linux 5.14; Python's mmap has no name for it


class SpillFile:
    """`count` frames of `frame_bytes` each, of which the byte ranges `used` are ever written.

    Raises `Overloaded` when the disk has no room for them."""

    def __init__(self, folder: Path, count: int, frame_bytes: int, used: Sequence[tuple[int, int]]) -> None:
        self._stride = page_aligned(frame_bytes)
        self._frame_bytes = frame_bytes
        self._used = used
        descriptor, path = tempfile.mkstemp(prefix="spill-", dir=folder)
        try:
            os.unlink(path)
            os.ftruncate(descriptor, count * self._stride)
            self._reserve(descriptor, count)
            self._map = mmap.mmap(descriptor, count * self._stride, flags=mmap.MAP_SHARED)
        finally:
            os.close(descriptor)
        self._map.madvise(mmap.MADV_RANDOM)  # a unit is 2 KB somewhere: reading on around it would be waste
        self._base = int(torch.frombuffer(self._map, dtype=torch.uint8).data_ptr())
        self._bytes = memoryview(self._map)
        self.free = FreeFrames(count)

    def _reserve(self, descriptor: int, count: int) -> None:
        try:
            for frame in range(count):
                for start, end in self._used:
                    os.posix_fallocate(descriptor, frame * self._stride + start, end - start)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            size = count * sum(end - start for start, end in self._used)
            raise Overloaded(
                f"The disk has no room for {size // 1024**2} MiB of COLD KV.",
                hint="Free disk space, or lower kv_cache.spill (0 turns the COLD tier off).",
                param="kv_cache.spill",
            ) from None

    def address(self, frame: int) -> int:
        return self._base + frame * self._stride

    def view(self, frame: int) -> memoryview:
        """The writable bytes of a frame; reading them may wait for the disk."""
        start = frame * self._stride
        return self._bytes[start : start + self._frame_bytes]

    def prefetch(self, frame: int) -> None:
        """Start reading a frame. Returns at once."""
        for start, end in self._pages(frame):
            self._map.madvise(mmap.MADV_WILLNEED, start, end - start)

    def fetch(self, frame: int) -> None:
        """Have a frame in RAM when this returns, where the system can; else reads wait as they come."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start, end in self._pages(frame):
            libc.madvise(self._base + start, end - start, _MADV_POPULATE_READ)

    def _pages(self, frame: int) -> list[tuple[int, int]]:
        base = frame * self._stride
        return [(base + start // 4096 * 4096, base + page_aligned(end)) for start, end in self._used]
