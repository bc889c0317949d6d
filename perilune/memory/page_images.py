"""Pictures of documents' pages, drawn in a parser process when somebody looks, and kept in RAM for a while.

Knows parsers and bytes; who may look is the library's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import closing
from pathlib import Path

from perilune.config import DocumentSettings
from perilune.errors import UnsupportedDocument
from perilune.memory.ingest.protocol import Job, Picture
from perilune.memory.ingest.sandbox import Parsers

KEPT_BYTES = 32 * 1024**2
CPU_S = 30
"""Most CPU seconds that drawing a page may take."""

_Key = tuple[str, int, int]


class PageImages:
    """Thread-safe."""

    def __init__(self, parsers: Parsers, settings: DocumentSettings, kept_bytes: int = KEPT_BYTES) -> None:
        self._parsers = parsers
        self._settings = settings
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[_Key, bytes] = OrderedDict()  # the one that was looked at last comes last
        self._lock = threading.Lock()

    def get(self, file_id: str, path: Path, filename: str, page: int, width: int) -> bytes:
        """A PNG. Raises `UnsupportedDocument` for what can't be drawn."""
        key = (file_id, page, width)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        drawn = self._draw(path, filename, page, width)
        with self._lock:
            self._kept[key] = drawn
            while sum(map(len, self._kept.values())) > self._kept_bytes:
                self._kept.popitem(last=False)
        return drawn

    def forget(self, file_id: str) -> None:
        """The file is deleted."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == file_id]:
                del self._kept[key]

    def _draw(self, path: Path, filename: str, page: int, width: int) -> bytes:
        job = Job(
            path=str(path),
            filename=filename,
            first_page=page,
            offset_chars=0,
            max_pages=self._settings.max_pages,
            max_text_bytes=0,
            memory_bytes=self._settings.parser_memory,
            cpu_s=CPU_S,
            picture_width=width,
        )
        with closing(self._parsers.run(job)) as frames:
            for message in frames:
                if isinstance(message, Picture):
                    return message.png
        raise UnsupportedDocument("The page can't be drawn.", hint="Read the page's text.")
