"""The server's C heap: as many arenas as were asked for, however many threads there are."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest

from perilune.cli.heap import limit_arenas, trim_at_rest

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


def test_free_heap_goes_back_after_work_and_only_then() -> None:
    given = []

    async def scenario() -> None:
        task = asyncio.create_task(trim_at_rest(lambda: given.append(time.process_time()), 0.2))
        await asyncio.sleep(1.0)
        assert not given
        begun_s = time.process_time()
        while time.process_time() - begun_s < 1.2:
            sum(range(10_000))
        for _ in range(100):
            await asyncio.sleep(0.1)
            if given:
                break
        await asyncio.sleep(1.0)
        task.cancel()

    asyncio.run(scenario())
    assert len(given) == 1


_FREED = """
import ctypes, re
from perilune.cli.heap import limit_arenas, trim
limit_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def resident(): return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
held = [libc.malloc(ctypes.c_size_t(100_000)) for _ in range(500)]
for at in held:
    ctypes.memset(at, 1, 100_000)
most = resident()
for at in held[:-1]:
    libc.free(ctypes.c_void_p(at))
kept = resident()
assert trim()
print(most - kept, most - resident())
"""


def test_pages_between_what_is_used_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before < 10 << 20 < 40 << 20 < after
