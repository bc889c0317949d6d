"""A parser process with a parser that misbehaves: `bad_worker.py MODE`. Everything else is the real worker."""

from __future__ import annotations

import os
import socket
import sys
import time
import types
from collections.abc import Iterator

from perilune.memory.chunk import Span
from perilune.memory.ingest import formats, worker
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
    time.sleep(600)


def misbehave() -> None:
    if MODE in ("hang", "mute"):
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


def pages() -> Iterator[str]:
    for number in range(8):
        yield f"Page {number} is fine.\n"
    connect() if MODE.startswith("connect-") else misbehave()
    yield "end\n"


def parse(source: Source) -> Parsed:
    return Parsed(9, map(PageText, list(pages()) if MODE == "early" else pages()))


module = types.ModuleType("bad_parser")
module.parse = parse  # type: ignore[attr-defined]
sys.modules["bad_parser"] = module
formats.PARSERS["text"] = "bad_parser"
status = worker.main()
sys.stdout.flush()
os._exit(status)
