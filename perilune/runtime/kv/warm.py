"""WARM: frames for the payloads of closed segments, in anonymous memory.

Knows numbered frames of equal size. Knows nothing of what lies in them, or of the COLD tier.
"""

from __future__ import annotations

from perilune.kernels.memory import zeroed_bytes

PAGE_BYTES = 4096


class FreeFrames:
    """Which of `count` frames are free; the lowest is given first, so that few pages are ever touched."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        return self._free.pop() if self._free else None

    def give(self, frame: int) -> None:
        self._free.append(frame)


class WarmFrames:
    """`count` frames of `frame_bytes`. RAM is taken page by page, at the first write to it."""

    def __init__(self, count: int, frame_bytes: int) -> None:
        self._stride = page_aligned(frame_bytes)
        self._frame_bytes = frame_bytes
        self._data = zeroed_bytes(count * self._stride)
        self._bytes = self._data.numpy().data
        self.free = FreeFrames(count)

    def address(self, frame: int) -> int:
        return int(self._data.data_ptr()) + frame * self._stride

    def view(self, frame: int) -> memoryview:
        """The writable bytes of a frame."""
        start = frame * self._stride
        return self._bytes[start : start + self._frame_bytes]


def page_aligned(num_bytes: int) -> int:
    """Rounded up to whole pages: frames can then be advised and given back one by one."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
