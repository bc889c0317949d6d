"""One engine in one process, driven by JSON lines: the far side of `bench.driver`.

    python -m bench.worker ENGINE          requests on standard input, one reply line each on standard output

Runs inside the engine's own environment, so this module and `bench.engines.*` need nothing but that engine.
Whatever the engine prints goes to standard error. Requests: {"op": "load", …LoadSpec}, {"op": "prefill",
"token_ids"}, {"op": "decode", "token_ids", "new_tokens"}, {"op": "calibrate", "threads"}, {"op": "close"}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import IO, Any, Protocol


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to load. `model` is a GGUF file or a safetensors folder, whichever the engine reads."""

    model: str
    threads: int
    max_context_tokens: int


class BenchEngine(Protocol):
    """What a bench asks of an engine. Greedy, one sequence, no reuse between different prompts."""

    def prefill(self, token_ids: list[int]) -> int:
        """Compute a prompt from nothing and return its first greedy token."""
        ...

    def decode(self, token_ids: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
        """Greedy tokens after a prompt, and the seconds each took but the first, which belongs to prefill.

        The prompt's KV may be kept between calls with the same prompt.
        """
        ...

    def close(self) -> None: ...


Reply = dict[str, Any]


class Server:
    """Answers requests for one engine; `make` builds it from a LoadSpec."""

    def __init__(self, make: Callable[[LoadSpec], BenchEngine]) -> None:
        self._make = make
        self._engine: BenchEngine | None = None

    def answer(self, request: dict[str, Any]) -> Reply:
        operation = request["op"]
        if operation == "load":
            return self._load(request)
        if operation == "calibrate":
            from bench.machine import calibrate

            return asdict(calibrate(request["threads"]))
        if self._engine is None:
            raise RuntimeError("no model is loaded")
        if operation == "prefill":
            start = time.perf_counter()
            first = self._engine.prefill(request["token_ids"])
            return {"seconds": time.perf_counter() - start, "token": first}
        if operation == "decode":
            tokens, seconds = self._engine.decode(request["token_ids"], request["new_tokens"])
            return {"tokens": tokens, "seconds": seconds}
        if operation == "close":
            self._engine.close()
            self._engine = None
            return {}
        raise RuntimeError(f"unknown operation {operation!r}")

    def _load(self, request: dict[str, Any]) -> Reply:
        spec = LoadSpec(request["model"], request["threads"], request["max_context_tokens"])
        start = time.perf_counter()
        self._engine = self._make(spec)
        return {"seconds": time.perf_counter() - start}


def serve(server: Server, requests: IO[str], replies: IO[str]) -> None:
    """Answer until the input ends. A failed request gets {"error": …}; the worker lives on."""
    for line in requests:
        try:
            reply = server.answer(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def private_stdout() -> IO[str]:
    """The real standard output for replies; from here on, file descriptor 1 is standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def main() -> None:
    replies = private_stdout()
    module = importlib.import_module(f"bench.engines.{sys.argv[1]}")
    serve(Server(module.load), sys.stdin, replies)


if __name__ == "__main__":
    main()
