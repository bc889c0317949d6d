"""An embedder that remembers on disk what it has embedded: a bench is repeated, its sets don't change.

Bound to one model by its file's name. Not used by the product, which keeps vectors with their entries.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from perilune.memory.embed.protocol import Embedder, Role
from perilune.memory.vectors.protocol import Vector

FOLDER = Path.home() / ".cache" / "perilune-bench" / "embeddings"
_SAVE_EVERY = 2_048


class CachedEmbedder:
    """Implements `Embedder` over another one, which outlives it: `close` only saves."""

    def __init__(self, inner: Embedder, folder: Path = FOLDER) -> None:
        self._inner = inner
        self._file = folder / f"{inner.model}.npz"
        self._known: dict[str, Vector] = {}
        self._unsaved = 0
        self._lock = threading.Lock()
        if self._file.is_file():
            with np.load(self._file) as stored:
                self._known = dict(zip(stored["keys"].tolist(), stored["vectors"], strict=True))

    @property
    def model(self) -> str:
        return self._inner.model

    @property
    def width(self) -> int:
        return self._inner.width

    @property
    def remote(self) -> bool:
        return self._inner.remote

    @property
    def languages(self) -> frozenset[str] | None:
        return self._inner.languages

    @property
    def window_tokens(self) -> int | None:
        return self._inner.window_tokens

    def tokens(self, texts: Sequence[str], role: Role) -> list[int]:
        return self._inner.tokens(texts, role)

    def knows(self, texts: Sequence[str], role: Role) -> float:
        """Share of these texts that need no embedding."""
        return sum(_key(text, role) in self._known for text in texts) / max(1, len(texts))

    def embed(self, texts: Sequence[str], role: Role) -> Vector:
        keys = [_key(text, role) for text in texts]
        missing = [at for at, key in enumerate(keys) if key not in self._known]
        if missing:
            made = self._inner.embed([texts[at] for at in missing], role)
            with self._lock:
                self._known |= {
                    keys[at]: vector.astype(np.float16) for at, vector in zip(missing, made, strict=True)
                }
                self._unsaved += len(missing)
                if self._unsaved >= _SAVE_EVERY:
                    self._save()
        found: Vector = np.array([self._known[key] for key in keys], np.float32)
        return found

    def close(self) -> None:
        with self._lock:
            if self._unsaved:
                self._save()

    def _save(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part.npz")
        np.savez(part, keys=np.array(list(self._known)), vectors=np.array(list(self._known.values()), np.float16))
        part.replace(self._file)
        self._unsaved = 0


def _key(text: str, role: Role) -> str:
    return hashlib.blake2b((role[0] + text).encode(), digest_size=12).hexdigest()
