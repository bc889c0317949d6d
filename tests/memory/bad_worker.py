"""A starter whose parsers misbehave: `bad_worker.py MODE`. Everything else is the real one."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
import types
from collections.abc import Iterator

from perilune.memory.chunk import Span
from perilune.memory.ingest import formats, plain, starter
from perilune.memory.ingest.pagination import PageText, Parsed
from perilune.memory.ingest.protocol import Batch, Opened, encode
from perilune.memory.ingest.source import Source

MODE = sys.argv[1]


def quote() -> None:
    print("a library prints: my secret diary", file=sys.stderr)
    print("MyDiaryError: my secret diary", file=sys.stderr)
    raise ValueError("my secret diary")


def connect() -> None:
    socket.create_connection(("127.0.0.1", int(MODE.partition("-")[2])), timeout=2).close()


def hang() -> None:
    if MODE == "mute":  # its end can't be waited for either
        os.close(1)
    if MODE == "deaf":  # holds the interpreter, so that its own watch over stdin can't run
        ctypes.PyDLL(None).sleep(600)
    time.sleep(600)


def misbehave() -> None:
    if MODE in ("hang", "mute", "deaf"):
        hang()
    elif MODE == "spin":
        while True:
            pass
    elif MODE == "abort":
        os.abort()
    elif MODE == "raise":
        raise RuntimeError("a parser's own fault")
    elif MODE == "quote":
        quote()
    elif MODE == "eat":
        hoard = []
        while True:
            hoard.append(bytearray(16 * 1024**2))
    elif MODE == "junk":
        os.write(1, b"\xff" * 4096)
    elif MODE == "lie":
        os.write(1, encode(Opened(1)) + encode(Batch((PageText("short"),), (Span(1, 0, 10**6),), b"", None)))
    elif MODE == "write":
        with open("/tmp/perilune-bad-worker", "wb") as file:
            file.write(bytes(64 * 1024**2))


def looked_around() -> str:
    """What a parser finds of the one before it, and what it holds."""
    remembered, os.environ["MARK"] = os.environ.get("MARK"), "left behind"
    held = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    return f"remembered {remembered}, held {sorted(held)}, nice {os.nice(0)}\n"


def compute(seconds: float) -> None:
    begun_s = time.process_time()
    while time.process_time() - begun_s < seconds:
        pass


def pages() -> Iterator[str]:
    for number in range(8):
        yield f"Page {number} is fine, says parser {os.getpid()} of {os.getppid()}.\n"
    if MODE == "look":
        yield looked_around()
    if MODE == "compute":
        compute(0.7)
    if MODE in ("look", "compute"):
        return
    connect() if MODE.startswith("connect-") else misbehave()
    yield "end\n"


def parse(source: Source) -> Parsed:
    if source.read().startswith(b"good"):
        return plain.parse(source)
    if MODE == "silent":
        hang()
    return Parsed(9, map(PageText, list(pages()) if MODE == "early" else pages()))


module = types.ModuleType("bad_parser")
module.parse = parse  # type: ignore[attr-defined]
sys.modules["bad_parser"] = module
formats.PARSERS["text"] = "bad_parser"
starter.main()
