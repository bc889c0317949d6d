"""Bytes that come piece by piece, as a file that can be read once. Knows nothing of where they come from."""

from __future__ import annotations

import io
from collections.abc import Generator


class Pieces(io.RawIOBase):
    """Can't seek. Closing it closes what the pieces come from."""

    def __init__(self, pieces: Generator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes, as many as one piece holds; all that is left where that is negative."""
        if size < 0:
            return b"".join([self._left, *self._pieces])
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._left = piece
        data, self._left = self._left[:size], self._left[size:]
        return data

    def close(self) -> None:
        self._pieces.close()
        super().close()
