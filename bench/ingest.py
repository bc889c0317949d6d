"""How fast documents become searchable: a 1,000-page PDF, many small texts, a changed page, a scanned page.

    python -m bench.ingest [--quick] [--json FILE]

The real library, with parser processes (nice 19, one thread) and a SQLite database in a temporary folder; no model
and no embeddings. The PDF is Octave's manual (Debian's octave-doc, 1,158 pages). Small documents are parsed two at
a time, as the service does. The changed manual has one page replaced: `redone_pages` counts the pages that the
parser cut into passages and indexed anew. The scanned page is a dense one of the manual at 150 dpi.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pypdfium2 as pdfium
import sqlalchemy as sa

from bench.machine import CpuClock, describe
from bench.report import Bar, Options, Result, finish, parse_options
from perilune.config import DocumentSettings
from perilune.core import FileRecord, FileStatus
from perilune.memory.ingest import sandbox
from perilune.memory.ingest.protocol import Batch, Job
from perilune.memory.library import Library
from perilune.memory.schema import PAGES
from perilune.memory.store import Store

MANUAL = Path("/usr/share/doc/octave/octave.pdf")
BARS = {
    "pdf_1000_pages_searchable_s": Bar(at_most=60, unit="s"),
    "pdf_first_page_searchable_s": Bar(at_most=10, unit="s"),
    "small_documents_per_s": Bar(at_least=20, unit="documents/s"),
    "redone_pages": Bar(at_most=1, unit="pages"),
}
SMALL_DOCUMENTS, QUICK_SMALL_DOCUMENTS = 400, 100
SMALL_CHARS = 2_000
PARALLEL = 2
CHANGED_PAGE, SCANNED_PAGE = 500, 200
_TENANT = "local"
_MAX_BYTES = 64 * 1024**2


def main() -> None:
    options = parse_options("How fast documents become searchable.", rounds=3)
    clock = CpuClock.now([os.getpid()])
    result = Result("ingest", {}, describe(), [], quick=options.quick)
    rounds = 1 if options.quick else options.rounds
    _figures(result, [_measure(options) for _ in range(rounds)])
    result.machine["foreign_share"] = round(CpuClock.now([os.getpid()]).foreign_share(clock), 3)
    finish(result, BARS, options)


def _figures(result: Result, runs: list[dict[str, float]]) -> None:
    result.runs.extend(dict(run) for run in runs)
    for key in runs[0]:
        values = [run[key] for run in runs]
        result.figures[key] = round(median(values), 3)
        result.spread[key] = (round(min(values), 3), round(max(values), 3))


def _measure(options: Options) -> dict[str, float]:
    with _library() as (library, store):
        first_s, whole_s, manual = _ingest(library, MANUAL.read_bytes(), MANUAL.name)
        changed = _changed_manual()
        _, changed_s, _ = _ingest(library, changed, MANUAL.name)
        redone = _redone(changed, store, manual)
    with _library() as (library, _):
        rate = _small_documents(library, QUICK_SMALL_DOCUMENTS if options.quick else SMALL_DOCUMENTS)
    with _library() as (library, _):
        _, ocr_s, _ = _ingest(library, _scan(), "scan.pdf")
    return {
        "pdf_1000_pages_searchable_s": whole_s,
        "pdf_first_page_searchable_s": first_s,
        "changed_page_s": changed_s,
        "redone_pages": redone,
        "small_documents_per_s": rate,
        "ocr_page_s": ocr_s,
    }


@contextmanager
def _library() -> Iterator[tuple[Library, Store]]:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        try:
            yield Library(store, Path(folder)), store
        finally:
            store.close()


def _ingest(library: Library, data: bytes, name: str) -> tuple[float, float, FileRecord]:
    """(seconds to the first page, seconds to the last, the record), from the begin of the upload."""
    start = time.monotonic()
    record = library.add_file(_TENANT, name, "assistants", io.BytesIO(data), _MAX_BYTES)
    first_s = 0.0
    for record in library.parse(_TENANT, record.file_id):  # noqa: B020
        if record.pages_parsed and not first_s:
            first_s = time.monotonic() - start
    if record.status is not FileStatus.PREFILLING:
        raise SystemExit(f"{name} was not read: {record.error}")
    return first_s, time.monotonic() - start, record


def _small_documents(library: Library, count: int) -> float:
    """Documents per second: texts of 2,000 characters out of the manual, each an upload and a parser of its own."""
    with pdfium.PdfDocument(MANUAL) as document:
        text = "".join(document[page].get_textpage().get_text_range() for page in range(100, 140))
    texts = [f"Note {n}.\n{text[n * 97 : n * 97 + SMALL_CHARS]}".encode() for n in range(count)]
    start = time.monotonic()
    with ThreadPoolExecutor(PARALLEL) as pool:
        for _ in pool.map(lambda item: _ingest(library, item[1], f"note-{item[0]}.txt"), enumerate(texts)):
            pass
    return count / (time.monotonic() - start)


def _changed_manual() -> bytes:
    """The manual with one page taken out and another put in, which no other page is like."""
    with pdfium.PdfDocument(MANUAL) as document, pdfium.PdfDocument(_note()) as note:
        document.del_page(CHANGED_PAGE - 1)
        document.import_pages(note, index=CHANGED_PAGE - 1)
        buffer = io.BytesIO()
        document.save(buffer)
    return buffer.getvalue()


def _note() -> bytes:
    from reportlab.pdfgen import canvas

    buffer = io.BytesIO()
    drawing = canvas.Canvas(buffer)
    drawing.drawString(72, 700, "This page was changed after the manual had been read.")
    drawing.save()
    return buffer.getvalue()


def _scan() -> bytes:
    """A page of the manual as an image in a PDF."""
    from reportlab.lib.utils import ImageReader
    from reportlab.pdfgen import canvas

    buffer = io.BytesIO()
    with pdfium.PdfDocument(MANUAL) as document:
        page = document[SCANNED_PAGE - 1]
        drawing = canvas.Canvas(buffer, pagesize=page.get_size())
        drawing.drawImage(ImageReader(page.render(scale=150 / 72).to_pil()), 0, 0, *page.get_size())
    drawing.save()
    return buffer.getvalue()


def _redone(changed: bytes, store: Store, manual: FileRecord) -> int:
    """Pages that a parser which knows the manual sends with text, and not as unchanged."""
    query = sa.select(PAGES.c.digest, PAGES.c.text).where(PAGES.c.file_id == manual.file_id)
    with store.read() as connection:
        known = {row.digest: len(row.text) for row in connection.execute(query)}
    with tempfile.NamedTemporaryFile() as file:
        file.write(changed)
        file.flush()
        limits = DocumentSettings()
        job = Job(
            file.name, MANUAL.name, 1, 0, limits.max_pages, limits.max_text, limits.parser_memory, 600, 0, known
        )
        return sum(len(frame.pages) for frame in sandbox.Parsers().run(job) if isinstance(frame, Batch))


if __name__ == "__main__":
    main()
