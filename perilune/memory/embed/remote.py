"""Embeddings from any server that speaks OpenAI's `POST /embeddings`.

Knows the wire format. The prefixes that E5 models need are set per model, because a server can't be asked for them.
"""

from __future__ import annotations

import base64
import binascii
import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from perilune.memory.embed.process import PASSAGES_S, QUERY_S, unavailable
from perilune.memory.embed.protocol import Role
from perilune.memory.model_server import ModelServer, NoAnswer
from perilune.memory.vectors.protocol import Vector

_BATCH = 64


class RemoteEmbedder:
    """Implements `Embedder`. `url` is the base that `/embeddings` follows (`http://host:port/v1`).

    `prefixes` go before queries and passages. Raises `ConfigError` for an unusable URL.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str = "",
        prefixes: tuple[str, str] = ("", ""),
        query_s: float = QUERY_S,
    ) -> None:
        self._server = ModelServer(url, key=key, what="an embeddings server", param="memory.embedder")
        self._model = model
        self._prefixes: dict[Role, str] = {"query": prefixes[0], "passage": prefixes[1]}
        self._query_s = query_s
        self._width: int | None = None
        self._lock = threading.Lock()

    @property
    def model(self) -> str:
        return self._model

    @property
    def width(self) -> int:
        with self._lock:
            if self._width is None:
                self._width = int(self._ask([self._prefixes["query"] + "a"], self._query_s).shape[1])
            return self._width

    @property
    def remote(self) -> bool:
        return self._server.remote

    @property
    def languages(self) -> frozenset[str] | None:
        return None

    def embed(self, texts: Sequence[str], role: Role) -> Vector:
        if not texts:
            return np.empty((0, self.width), np.float32)
        said = [self._prefixes[role] + text for text in texts]
        patience_s = self._query_s if role == "query" else PASSAGES_S
        found = np.concatenate(
            [self._ask(said[at : at + _BATCH], patience_s) for at in range(0, len(said), _BATCH)]
        )
        if found.shape[1] != self.width:
            raise unavailable("the server changed the width of its vectors")
        return found

    @property
    def window_tokens(self) -> int | None:
        return None

    def tokens(self, texts: Sequence[str], role: Role) -> list[int]:
        """A token for each four bytes, about."""
        return [-(-len((self._prefixes[role] + text).encode()) // 4) for text in texts]

    def close(self) -> None:
        """End the calls under way; their callers get an error at once."""
        self._server.close()

    def _ask(self, texts: list[str], patience_s: float) -> Vector:
        payload = {"model": self._model, "input": texts, "encoding_format": "float"}
        try:
            data = self._server.post("embeddings", payload, patience_s)
        except NoAnswer as why:
            raise unavailable(str(why)) from None
        return _vectors(data, len(texts))


def _vectors(data: bytes, count: int) -> Vector:
    """The answer's vectors in the order of their indices, brought to length 1."""
    try:
        items = sorted(json.loads(data)["data"], key=lambda item: int(item["index"]))
        found = np.array([_numbers(item["embedding"]) for item in items], np.float32)
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        raise unavailable(f"the server's answer can't be read ({type(error).__name__})") from None
    if found.ndim != 2 or len(found) != count or not np.isfinite(found).all():
        raise unavailable("the server's answer holds something else than one vector a text")
    normal: Vector = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
    return normal


def _numbers(value: Any) -> Any:
    """A list of numbers, or base64 of float32, which some servers send whatever they are asked for."""
    return np.frombuffer(base64.b64decode(value, validate=True), "<f4") if isinstance(value, str) else value
