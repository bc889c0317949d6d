"""Keeps the server's C heap small. Knows glibc, and nothing of what is allocated.

glibc gives up to eight arenas a core to threads, and each keeps the most that it ever held: after some hundred
mixed requests a seventh of the server's memory was such free space (docs/log.md). Elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import os

_M_ARENA_MAX = -8  # malloc.h
_ARENAS = 2
_CHOSEN = "MALLOC_ARENA_MAX"


def limit_arenas() -> bool:
    """Let all threads share two arenas, unless the environment says how many; whether that was done."""
    if _CHOSEN in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, _ARENAS) == 1
