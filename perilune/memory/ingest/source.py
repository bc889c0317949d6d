"""What a parser reads: the uploaded file, or a member of an archive that was unpacked in memory.

Knows bytes and limits, no format. What is bounded per upload, and not per member, is counted in `Allowance`, which
a document and its members share.
"""

from __future__ import annotations

import io
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import BinaryIO

from perilune.memory.ingest.protocol import Job

OCR_PAGE_CPU_S = 120
"""Most CPU seconds that recognising one image may take, on top of `documents.parser_cpu_s`; 10 is usual."""

MAX_UNPACKED_BYTES = 1024**3
MAX_MEMBERS = 5_000
MAX_RATIO = 250
"""Text packs to a tenth; what unpacks to more than this many times its size is taken for a bomb,"""

FREE_BYTES = 32 * 1024**2
"""unless it is no larger than this."""


@dataclass(slots=True)
class Allowance:
    """What is left of an upload's budget."""

    images: int
    limit_bytes: int = MAX_UNPACKED_BYTES
    unpacked_bytes: int = MAX_UNPACKED_BYTES
    members: int = MAX_MEMBERS

    @classmethod
    def of(cls, job: Job) -> Allowance:
        limit_bytes = min(max(FREE_BYTES, MAX_RATIO * Path(job.path).stat().st_size), MAX_UNPACKED_BYTES)
        return cls(job.ocr_pages, limit_bytes, limit_bytes)

    @contextmanager
    def image(self) -> Iterator[None]:
        """Takes one image. Its CPU time doesn't count against the parser's; it has a bound of its own."""
        self.images -= 1
        begun_s = time.process_time()
        _raise_cpu_limit(OCR_PAGE_CPU_S)
        try:
            yield
        finally:
            _raise_cpu_limit(round(time.process_time() - begun_s) - OCR_PAGE_CPU_S)


@dataclass(frozen=True, slots=True)
class Source:
    """`data` is None for the uploaded file itself; `depth` counts the archives around it."""

    job: Job
    filename: str
    allowance: Allowance
    first_page: int = 1
    data: bytes | None = None
    depth: int = 0

    @classmethod
    def of(cls, job: Job) -> Source:
        return cls(job, job.filename, Allowance.of(job), job.first_page)

    def identity(self, number: int) -> bytes:
        """What a digest of the content of page `number` must add: in an archive, which file it is of."""
        return b"" if self.depth == 0 else f"{self.filename}#{number}".encode(errors="replace")

    @property
    def suffix(self) -> str:
        """The name's extension in lower case, with its dot."""
        return PurePath(self.filename).suffix.lower()

    def member(self, filename: str, data: bytes) -> Source:
        return replace(self, filename=filename, data=data, first_page=1, depth=self.depth + 1)

    def open(self) -> BinaryIO:
        """The bytes from their beginning, for the caller to close."""
        return Path(self.job.path).open("rb") if self.data is None else io.BytesIO(self.data)

    def read(self) -> bytes:
        return Path(self.job.path).read_bytes() if self.data is None else self.data


def _raise_cpu_limit(seconds: int) -> None:
    """Move the soft limit, where there is one; the hard one leaves room for every image that may be read."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if soft != resource.RLIM_INFINITY:
        moved = soft + seconds
        resource.setrlimit(
            resource.RLIMIT_CPU, (moved if hard == resource.RLIM_INFINITY else min(moved, hard), hard)
        )
