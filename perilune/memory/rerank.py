"""The last look at what a search found: a cross-encoder reads the question and each passage together.

`rank.py` always orders, within a millisecond. A cross-encoder tells more and takes longer (half a second a pair on
a CPU was measured, tens of milliseconds for all on a GPU), so it is a stage with a deadline of its own, is there
only where one is configured, and is skipped when it is late. Knows the wire format that Jina, Cohere, llama.cpp's
server and vLLM share: `POST /rerank`. Knows neither SQL nor who may be asked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from perilune.memory.model_server import ModelServer, NoAnswer

_MAX_PASSAGE_CHARS = 2_000
"""Cross-encoders read 512 tokens; more is only sent in vain."""


class Reranker(Protocol):
    """Thread-safe."""

    @property
    def remote(self) -> bool:
        """Whether texts leave this machine: then only those may be given that `locality` lets go."""
        ...

    @property
    def most(self) -> int:
        """Passages that it is given at most."""
        ...

    def scores(self, question: str, passages: Sequence[str]) -> list[float]:
        """How well each passage answers; higher is better, on a scale of its own. Raises `NoAnswer`, also where
        its deadline passes."""
        ...

    def close(self) -> None: ...


class RemoteReranker:
    """`within_s` is the deadline, whatever the server does. Raises `ConfigError` for an unusable URL."""

    def __init__(self, url: str, model: str, *, key: str = "", within_s: float = 0.2, most: int = 32) -> None:
        self._server = ModelServer(url, key=key, what="a re-ranking server", param="memory.reranker")
        self._model = model
        self._within_s = within_s
        self._most = most
        self._pool = ThreadPoolExecutor(2, "rerank")  # of its own: a server that hangs holds no other search up

    @property
    def remote(self) -> bool:
        return self._server.remote

    @property
    def most(self) -> int:
        return self._most

    def scores(self, question: str, passages: Sequence[str]) -> list[float]:
        given = [passage[:_MAX_PASSAGE_CHARS] for passage in passages]
        payload = {"model": self._model, "query": question, "documents": given, "top_n": len(given)}
        asked: Future[bytes] = self._pool.submit(self._server.post, "rerank", payload, self._within_s)
        try:
            data = asked.result(self._within_s)
        except TimeoutError:
            asked.cancel()
            raise NoAnswer(f"it took longer than {self._within_s:g} s") from None
        return _scores(data, len(given))

    def close(self) -> None:
        self._server.close()
        self._pool.shutdown()


def _scores(data: bytes, count: int) -> list[float]:
    """The answer's scores in the order of the passages."""
    try:
        told = {int(each["index"]): float(each["relevance_score"]) for each in json.loads(data)["results"]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NoAnswer(f"its answer can't be read ({type(error).__name__})") from None
    found = [told.get(at, math.nan) for at in range(count)]
    if len(told) != count or not all(map(math.isfinite, found)):
        raise NoAnswer("its answer holds something else than one score a passage")
    return found
