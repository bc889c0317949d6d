"""Pieces of an evaluation already measured, one JSON line each, so that a cut run goes on where it stopped.

A piece counts only for what it was measured of: model, text, sizes and code. Knows files; not what pieces mean.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune.errors import InvalidRequest

Key = Sequence[str | int | float]


class Journal:
    """A file of pieces, or without a path none: then nothing is kept. `of` says what is measured.

    One file may hold the pieces of several models, texts or plans. Raises `InvalidRequest` for a file that is
    something else or can't be read.
    """

    def __init__(self, path: Path | None, of: Mapping[str, Any]) -> None:
        self._path, self._of = path, dict(of)
        self._pieces: dict[str, Any] = {}
        self._torn = False
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{path.name} can't be read: {error}.", hint="Name another file.") from None
        for number, line in enumerate(text.splitlines()):
            try:
                entry = json.loads(line)
                of, key, data = entry["of"], entry["key"], entry["data"]
            except (ValueError, KeyError, TypeError):
                if number == 0:
                    raise InvalidRequest(
                        f"{path.name} is no journal of `eval kv`.", hint="Name a new file, or one that it wrote."
                    ) from None
                continue  # a kill leaves a line half written: the piece is measured again
            if of == self._of:
                self._pieces[json.dumps(key)] = data
        self._torn = bool(text) and not text.endswith("\n")

    def get(self, key: Key) -> Any | None:
        """A piece's data as it was put (tuples come back as lists), or None."""
        return self._pieces.get(json.dumps(list(key)))

    def put(self, key: Key, data: Any) -> None:
        """Keep a piece, in the file too when this returns."""
        if self._path is None:
            return
        line = json.dumps({"of": self._of, "key": list(key), "data": data}) + "\n"
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" + line if self._torn else line)
        self._torn = False
        self._pieces[json.dumps(list(key))] = data


def code_digest(sources: Sequence[Path]) -> str:
    """The start of a SHA-256 over source files: what other code measured is measured again."""
    digest = hashlib.sha256()
    for source in sorted(sources):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]
