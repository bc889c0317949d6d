"""The server's C heap: as many arenas as were asked for, however many threads there are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from perilune.cli.heap import limit_arenas

_COUNT = """
import ctypes, re, sys, tempfile, threading
from perilune.cli.heap import limit_arenas
if sys.argv[1] == "limited":
    assert limit_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
held = threading.Barrier(9)
def work():
    libc.malloc(1_000)
    held.wait()
    held.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
held.wait()
with tempfile.NamedTemporaryFile() as told:
    libc.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fopen(told.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(len(re.findall(rb"<heap nr=", told.read())))
held.wait()
"""


def _arenas(how: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    done = subprocess.run(
        [sys.executable, "-c", _COUNT, how], env=environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_threads_share_two_arenas() -> None:
    assert _arenas("limited") <= 2 < _arenas("as it is")


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "8")
    assert not limit_arenas()
