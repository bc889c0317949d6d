"""A parser: reads one job from stdin, writes frames to stdout, ends. Forked by `starter`, in a process of its own.

Runs at nice 19 with one thread, under limits on memory, CPU, files and file size; touches the document it was given
and nothing else: no database, and no network where the system let the starter give that up. It also cuts passages
and builds their postings, so that the service's process only has to store them. Ends by itself when who reads it
dies (end of file on stdin).
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import BinaryIO

from perilune.errors import Unreadable, UnsupportedDocument
from perilune.memory import language, postings
from perilune.memory.analyse import Analyser
from perilune.memory.chunk import Span, is_listing, passages
from perilune.memory.ingest.formats import open_document
from perilune.memory.ingest.pagination import PageText, Parsed, digest_of
from perilune.memory.ingest.protocol import (
    LENGTHS,
    Batch,
    Done,
    Failed,
    Frame,
    Job,
    Opened,
    Picture,
    Unchanged,
    decode_job,
    encode,
    lengths,
)
from perilune.memory.ingest.source import OCR_PAGE_CPU_S, Source

_NICE = 19
_LOOKED_AT_NICE = 5  # a person waits for a picture
_MAX_FILES = 64
_MAX_FILE_BYTES = 1024**2  # what the process may write: its error log
_FIRST_BATCH_PAGES = 8
_MAX_BATCH_PAGES = 64
_BATCH_S = 0.5
_MAX_BATCH_CHARS = 1_000_000
_MAX_UNCHANGED_PAGES = 1_000
_LISTING_STRETCH = 4  # halves about the BM25 score of a table of contents: it says where, not what


def apply_limits(job: Job) -> None:
    """Bound this process before it opens the document. Hard limits: it can't raise them again."""
    os.nice(_NICE if not job.picture_width else _LOOKED_AT_NICE)
    for which, soft, hard in (
        (resource.RLIMIT_AS, job.memory_bytes, job.memory_bytes),
        (
            resource.RLIMIT_CPU,
            job.cpu_s,
            job.cpu_s + 5 + job.ocr_pages * OCR_PAGE_CPU_S,
        ),  # SIGXCPU first: it tells this limit from the system's kill
        (resource.RLIMIT_NOFILE, _MAX_FILES, _MAX_FILES),
        (resource.RLIMIT_FSIZE, _MAX_FILE_BYTES, _MAX_FILE_BYTES),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(which, (soft, hard))


def exit_with_parent(stdin: BinaryIO) -> None:
    """Leave as soon as stdin ends; the parent holds its other end open while it wants pages."""
    stdin.read(1)
    os._exit(0)


def read_job(stdin: BinaryIO) -> Job:
    json_bytes, _ = lengths(stdin.read(LENGTHS.size))
    return decode_job(stdin.read(json_bytes))


def frames(job: Job) -> Iterator[Frame]:
    """All there is to say about a document. Raises `UnsupportedDocument`, `MemoryError`, any parser fault."""
    if job.picture_width:
        from perilune.memory.ingest.picture import draw

        yield Picture(draw(Source.of(job), job.picture_width))
        yield Done()
        return
    parsed = open_document(Source.of(job))
    yield Opened(parsed.pages_total)
    yield from _batches(parsed, job)
    yield Done()


def _batches(parsed: Parsed, job: Job) -> Iterator[Batch | Unchanged]:
    """Small batches first, so that a search finds something at once, then larger ones, which cost less."""
    batch = _Batch(job.first_page, job.offset_chars)
    size, begun, text_bytes = _FIRST_BATCH_PAGES, time.monotonic(), 0
    for page in parsed.pages:
        digest = page.digest or digest_of(page.text.encode())
        text_bytes += len(page.text.encode())
        if text_bytes > job.max_text_bytes:
            raise UnsupportedDocument(
                f"The document holds more than {job.max_text_bytes / 1024**2:,.0f} MB of text.",
                hint="Split it, or raise documents.max_text.",
                why=Unreadable.TOO_MUCH,
            )
        known_chars = job.known.get(digest)
        if batch.holds(unchanged=known_chars is None):
            yield batch.take()
        batch.add(PageText(page.text, page.anchor, digest), known_chars)
        if batch.is_full(size) or time.monotonic() - begun > _BATCH_S:
            yield batch.take()
            size, begun = min(size * 2, _MAX_BATCH_PAGES), time.monotonic()
    if batch.pages:
        yield batch.take()


class _Batch:
    """Pages that wait to be sent, with their passages and terms; or pages that an earlier version has, too."""

    def __init__(self, next_page: int, offset_chars: int) -> None:
        self._analyser = Analyser()
        self._next_page = next_page
        self._offset_chars = offset_chars
        self._chars = 0
        self._language: str | None = None
        self._sample = ""
        self._unchanged = False
        self.pages: list[PageText] = []
        self._spans: list[Span] = []
        self._terms: list[list[str]] = []
        self._lengths: list[int] = []

    def holds(self, *, unchanged: bool) -> bool:
        """Whether there are pages of this kind."""
        return bool(self.pages) and self._unchanged is unchanged

    def add(self, page: PageText, known_chars: int | None) -> None:
        """`known_chars`: the length of the page's text in the earlier version; None for a page that is new."""
        self._unchanged = known_chars is not None
        if known_chars is None:
            self._index(page.text)
            known_chars = len(page.text)
        self.pages.append(page)
        self._next_page += 1
        self._offset_chars += known_chars
        self._chars += known_chars

    def _index(self, text: str) -> None:
        for span in passages(self._next_page, text, self._offset_chars):
            passage = text[span.start - self._offset_chars : span.end - self._offset_chars]
            terms = self._analyser.terms(passage)
            self._spans.append(span)
            self._terms.append(terms)
            self._lengths.append(len(terms) * (_LISTING_STRETCH if is_listing(passage) else 1))

    def _detect(self) -> str | None:
        """The language by what was read first: more of it than a first page, which is often a title alone."""
        if len(self._sample) < language.SAMPLE_CHARS:
            self._sample += "".join(page.text for page in self.pages)
            self._language = language.detect(self._sample)
        return self._language

    def is_full(self, size: int) -> bool:
        if self._unchanged:
            return len(self.pages) >= _MAX_UNCHANGED_PAGES
        return len(self.pages) >= size or self._chars >= _MAX_BATCH_CHARS

    def take(self) -> Batch | Unchanged:
        taken: Batch | Unchanged
        if self._unchanged:
            taken = Unchanged(tuple((page.digest, page.anchor) for page in self.pages))
        else:
            found = postings.build(self._terms, self._lengths)
            taken = Batch(tuple(self.pages), tuple(self._spans), found, self._detect())
        self.pages, self._spans, self._terms, self._lengths, self._chars = [], [], [], [], 0
        return taken


def out_of_memory(job: Job) -> Failed:
    return Failed(
        f"Reading the document takes more than {job.memory_bytes / 1024**2:,.0f} MB of memory.",
        "Split it, or raise documents.parser_memory.",
        Unreadable.TOO_MUCH,
    )


def where_it_failed(error: BaseException) -> str:
    """The exception's type and the frames it passed: no message, because that may quote the document."""
    frames = traceback.extract_tb(error.__traceback__)
    return "\n".join([*(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames), type(error).__name__])


def main() -> int:
    """Serve the job; the status to end with."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    job = read_job(stdin)
    apply_limits(job)
    threading.Thread(target=exit_with_parent, args=(stdin,), daemon=True).start()
    try:
        for message in frames(job):
            stdout.write(encode(message))
            stdout.flush()
    except UnsupportedDocument as error:
        last = Failed(error.message, error.hint, error.why)
    except MemoryError:
        last = out_of_memory(job)
    except BrokenPipeError:
        return 0
    except Exception as error:
        print(where_it_failed(error), file=sys.stderr)
        return 1
    else:
        return 0
    stdout.write(encode(last))
    stdout.flush()
    return 0
