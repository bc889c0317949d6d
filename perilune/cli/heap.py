"""Keeps the server's C heap small. Knows glibc and the CPU clock, and nothing of what is allocated.

glibc gives up to eight arenas a core to threads, and each keeps the most that it ever held: after some hundred
mixed requests a seventh of the server's memory was such free space (docs/log.md). Elsewhere nothing happens.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

REST_S = 0.5
"""Between two looks at the CPU clock."""

_REST_SHARE = 0.1  # of a core; below, the server rests
_WORK_S = 1.0  # of CPU time; less leaves little to give back
_M_ARENA_MAX = -8  # malloc.h
_ARENAS = 2
_CHOSEN = "MALLOC_ARENA_MAX"


def limit_arenas() -> bool:
    """Let all threads share two arenas, unless the environment says how many; whether that was done."""
    if _CHOSEN in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, _ARENAS) == 1


def trim() -> bool:
    """Give free pages of the heap back to the system; whether there were any. Holds up allocations meanwhile."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return malloc_trim is not None and malloc_trim(ctypes.c_size_t(0)) == 1


async def trim_at_rest(give_back: Callable[[], object] = trim, rest_s: float = REST_S) -> None:
    """After work, once the process rests, `give_back`; until cancelled."""
    trimmed_at_s = last_s = time.process_time()
    while True:
        await asyncio.sleep(rest_s)
        now_s = time.process_time()
        rests, last_s = now_s - last_s < _REST_SHARE * rest_s, now_s
        if rests and now_s - trimmed_at_s >= _WORK_S:
            await asyncio.to_thread(give_back)
            trimmed_at_s = last_s = time.process_time()
