"""A changed document: what is the same is taken over and reads the same as if all had been done anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core import FileRecord, FileStatus
from perilune.memory import postings
from perilune.memory.index import cut, read_segment
from perilune.memory.ingest import sandbox
from perilune.memory.ingest.protocol import Batch, Job, Unchanged
from perilune.memory.library import Library
from perilune.memory.passages import segments
from perilune.memory.reuse import earlier_version
from perilune.memory.schema import PAGES
from perilune.memory.store import Store
from tests.memory.conftest import add, ingest
from tests.memory.made import drawn, scanned
from tests.memory.test_formats import pdf


def manual(changes: dict[int, str] | None = None, pages: int = 60) -> list[str]:
    texts = [f"Section {n} of the manual.\nIt speaks of subject{n} and of tides." for n in range(1, pages + 1)]
    for number, text in (changes or {}).items():
        texts[number - 1] = text
    return texts


def state(library: Library, record: FileRecord) -> list[object]:
    """All that questions can see."""
    pages = library.pages("local", record.file_id)
    found = [
        [
            (p.page, p.start, p.end, p.text, round(p.score, 4))
            for p in library.search("local", [record.file_id], q, 5)
        ]
        for q in ("subject7", "subject31", "whale tides", "manual section 60", "first")
    ]
    return [pages, found, record.language, record.pages_total, library.text_chars("local", record.file_id)]


def anew(data: bytes, name: str, home: Path) -> list[object]:
    home.mkdir()
    store = Store(home)
    library = Library(store, home)
    result = state(library, ingest(library, data, name))
    store.close()
    return result


@pytest.mark.parametrize(
    "changed",
    [
        manual({31: "A page about the whale."}),
        [*manual()[:20], "One more page about the whale.", *manual()[20:]],
        manual()[1:],
        [*manual()[30:], *manual()[:30]],
        manual({n: f"A new page {n} about the whale." for n in range(1, 61)}),
        manual({5: "", 6: "", 30: ""}),
        manual(),
    ],
)
def test_a_changed_document_reads_as_if_done_anew(changed: list[str], library: Library, tmp_path: Path) -> None:
    ingest(library, pdf(manual()), "manual.pdf")
    data = pdf(changed)
    record = ingest(library, data, "manual.pdf")
    assert record.status is FileStatus.PREFILLING
    assert state(library, record) == anew(data, "manual.pdf", tmp_path / "anew")


def frames_of(path: Path, known: dict[str, int]) -> list[object]:
    return list(sandbox.Parsers().run(Job(str(path), path.name, 1, 0, 10**5, 10**8, 2**31, 100, 5, known)))


def digests(store: Store, record: FileRecord) -> dict[str, int]:
    with store.read() as connection:
        query = sa.select(PAGES.c.digest, PAGES.c.text).where(PAGES.c.file_id == record.file_id)
        return {row.digest: len(row.text) for row in connection.execute(query)}


def test_only_the_changed_page_is_done(library: Library, store: Store, tmp_path: Path) -> None:
    known = digests(store, ingest(library, pdf(manual()), "manual.pdf"))
    path = tmp_path / "changed.pdf"
    path.write_bytes(pdf(manual({31: "A page about the whale."})))
    frames = frames_of(path, known)
    done = [page.text for frame in frames if isinstance(frame, Batch) for page in frame.pages]
    assert done == ["A page about the whale.\n"]
    assert sum(len(frame.pages) for frame in frames if isinstance(frame, Unchanged)) == 59


def test_an_unchanged_scan_is_not_recognised_again(library: Library, store: Store, tmp_path: Path) -> None:
    scan = drawn(["The whale surfaced at noon"], (700, 200))
    record = ingest(library, scanned([scan]), "scan.pdf")
    path = tmp_path / "changed.pdf"
    path.write_bytes(scanned(["A page that was put before the scan.", scan]))
    frames = frames_of(path, digests(store, record))
    done = [page.text for frame in frames if isinstance(frame, Batch) for page in frame.pages]
    assert done == ["A page that was put before the scan.\n"]
    again = ingest(library, path.read_bytes(), "scan.pdf")
    assert library.search("local", [again.file_id], "whale", 1)[0].page == 2


def test_lines_that_moved_are_counted_anew(library: Library) -> None:
    lines = [f"value_{n} = {n}\n\n" for n in range(400)]
    ingest(library, "".join(lines).encode(), "a.py")
    record = ingest(library, ("# one more line\n" + "".join(lines)).encode(), "a.py")
    text = library.text("local", record.file_id)
    for page in library.pages("local", record.file_id):
        first = int(page.anchor.split("lines ")[1].split("-")[0])
        assert text.count("\n", 0, page.start) + 1 == first


def test_another_tenants_pages_are_never_taken(library: Library, store: Store) -> None:
    ingest(library, pdf(manual()), "manual.pdf", tenant="other")
    added = add(library, pdf(manual()), "manual.pdf")
    with store.read() as connection:
        assert earlier_version(connection, added) is None
        assert earlier_version(connection, add(library, b"x", "manual.pdf", "other")) is not None


def test_an_earlier_version_may_go_meanwhile(library: Library, store: Store) -> None:
    earlier = ingest(library, pdf(manual()), "manual.pdf")
    progress = library.parse("local", add(library, pdf(manual()[1:]), "manual.pdf").file_id)
    assert next(progress).status is FileStatus.PARSING
    while next(progress).pages_total is None:  # the parser knows the earlier version's pages from here on
        continue
    with store.write() as connection:
        connection.execute(PAGES.delete().where(PAGES.c.file_id == earlier.file_id))
    record = list(progress)[-1]
    assert (record.status, record.pages_total) == (FileStatus.PREFILLING, 59)
    assert library.search("local", [record.file_id], "subject60", 1)[0].page == 59


TERMS = st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=12), min_size=1, max_size=12)


@given(TERMS, st.data())
@settings(max_examples=60, deadline=None)
def test_a_cut_is_what_would_have_been_built(passages: list[list[str]], data: st.DataObject) -> None:
    low = data.draw(st.integers(0, len(passages) - 1))
    high = data.draw(st.integers(low + 1, len(passages)))
    lengths = [len(terms) for terms in passages]
    whole = read_segment(postings.build(passages, lengths))
    assert cut(whole, low, high) == postings.build(passages[low:high], lengths[low:high])


def test_a_batch_reads_only_its_own_postings(library: Library, store: Store) -> None:
    """However long the document is that a batch is added to."""
    record = ingest(library, pdf(manual(pages=200)), "manual.pdf")
    with store.read() as connection:
        whole = list(segments(connection, record.file_id, 0, 10**6))
        assert len(whole) > 2
        begin, last = whole[-1]
        for first in (begin, begin + len(last.lengths) - 1):
            assert [at for at, _ in segments(connection, record.file_id, first, first + 1)] == [begin]
        assert [at for at, _ in segments(connection, record.file_id, begin - 1, begin + 1)] == [whole[-2][0], begin]
