"""Files live, belong to one tenant, survive kills and go without a trace."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from perilune.core import FileRecord, FileStatus
from perilune.errors import (
    Conflict,
    IntegrityError,
    InvalidRequest,
    NotFound,
    Overloaded,
    TooLarge,
    UnsupportedDocument,
)
from perilune.memory.library import Library
from perilune.memory.responses import Made, ResponseStore
from perilune.memory.schema import METADATA
from perilune.memory.store import Store
from tests.memory.conftest import OCTAVE, add, ingest

TEXT = b"Perilune answers long documents.\n\nA moon tide is called perigean.\n"


def rows(store: Store, file_id: str) -> int:
    """Rows in any table that name the file."""
    with store.read() as connection:
        return sum(
            connection.execute(
                sa.select(sa.func.count()).select_from(table).where(table.c[column] == file_id)
            ).scalar_one()
            for table, column in ((t, c) for t in METADATA.tables.values() for c in ("file_id", "id") if c in t.c)
        )


def test_a_file_from_upload_to_delete(library: Library, store: Store, tmp_path: Path) -> None:
    record = add(library, TEXT, "moon.md")
    assert record.file_id.startswith("file-")
    assert len(record.file_id) == 29
    assert record.status is FileStatus.UPLOADED
    assert record.size_bytes == len(TEXT)
    assert library.get_file("local", record.file_id) == record
    assert library.list_files("local") == [record]
    assert library.unfinished_files() == [record]
    with library.open_file("local", record.file_id) as file:
        assert file.read() == TEXT

    progress = list(library.parse("local", record.file_id))
    assert progress[0].status is FileStatus.PARSING
    done = progress[-1]
    assert (done.status, done.pages_total, done.pages_parsed, done.language) == (FileStatus.PREFILLING, 1, 1, "en")
    assert library.text("local", record.file_id) == TEXT.decode()
    assert library.text_chars("local", record.file_id) == len(TEXT.decode())
    assert list(library.parse("local", record.file_id)) == [done]

    finished = replace(done, status=FileStatus.PROCESSED, tokens=12)
    library.set_status(finished)
    assert library.get_file("local", record.file_id) == finished
    assert library.unfinished_files() == []
    other = Library(store, tmp_path, counted_by="another model")
    assert other.all_files() == [replace(finished, tokens=None)], "counted by another model's tokenizer"

    library.delete_file("local", record.file_id)
    assert rows(store, record.file_id) == 0
    assert not any(path.is_file() for path in (tmp_path / "files").rglob("*"))
    with pytest.raises(NotFound):
        library.get_file("local", record.file_id)


def test_every_call_is_bound_to_the_tenant(library: Library) -> None:
    mine = ingest(library, TEXT, tenant="mine")
    other = ingest(library, b"Unrelated words about perigean moons, perigean perigean.", tenant="other")
    file_id = mine.file_id
    calls: list[Any] = [
        lambda tenant: library.get_file(tenant, file_id),
        lambda tenant: library.open_file(tenant, file_id).close(),
        lambda tenant: library.pages(tenant, file_id),
        lambda tenant: library.text(tenant, file_id),
        lambda tenant: library.text_chars(tenant, file_id),
        lambda tenant: list(library.parse(tenant, file_id)),
        lambda tenant: library.search(tenant, [file_id], "perigean", 5),
        lambda tenant: library.search(tenant, [file_id], "summarise this", 5),
        lambda tenant: library.set_status(replace(mine, tenant=tenant)),
        lambda tenant: library.delete_file(tenant, file_id),
    ]
    for call in calls:
        with pytest.raises(NotFound):
            call("other")
    for call in calls:
        call("mine")
    assert library.list_files("mine") == []
    assert library.list_files("other") == [other]
    assert library.all_files() == [other]


def test_ids_are_data_not_sql_or_paths(library: Library) -> None:
    for wrong in ("", "../../etc/passwd", "' OR '1'='1", "file-\0", "file-" + "x" * 10_000):
        with pytest.raises(NotFound):
            library.get_file("local", wrong)
        with pytest.raises(NotFound):
            library.search("local", [wrong], "x", 5)
    with pytest.raises(InvalidRequest):
        add(library, TEXT, tenant="../../etc")


def test_names_never_become_paths(library: Library, tmp_path: Path) -> None:
    record = add(library, TEXT, "../../../../tmp/perilune-escape.txt")
    assert record.filename == "tmp/perilune-escape.txt"
    stored = [path for path in (tmp_path / "files").rglob("*") if path.is_file()]
    assert [path.name for path in stored] == [record.file_id]


def test_search_is_restricted_and_its_ranking_is_private(library: Library) -> None:
    one = ingest(library, b"Tides follow the moon.\n\nPipes carry data.", "one.txt")
    before = library.search("local", [one.file_id], "moon pipes", 5)
    ingest(library, b"moon moon moon pipes pipes", "two.txt")
    ingest(library, b"moon", "three.txt", tenant="other")
    assert library.search("local", [one.file_id], "moon pipes", 5) == before
    assert {passage.file_id for passage in before} == {one.file_id}


def test_search_over_several_files_and_without_a_match(library: Library) -> None:
    one = ingest(library, b"Tides follow the moon.", "one.txt")
    two = ingest(library, b"Pipes carry the moon away.", "two.txt")
    ids = [one.file_id, two.file_id, one.file_id]
    assert {p.file_id for p in library.search("local", ids, "moon", 5)} == {one.file_id, two.file_id}
    assert len(library.search("local", ids, "moon", 1)) == 1
    assert library.search("local", ids, "zebra", 5) == []
    assert library.search("local", ids, "???", 5) == []
    assert library.search("local", [], "moon", 5) == []
    overview = library.search("local", ids, "Summarise these documents", 5)
    assert {p.file_id for p in overview} == {one.file_id, two.file_id}


def test_asking_while_it_is_parsed(library: Library) -> None:
    with OCTAVE.open("rb") as data:
        record = library.add_file("local", "octave.pdf", "assistants", data, 64 * 1024**2)
    progress = library.parse("local", record.file_id)
    found: list[tuple[int, int]] = []
    for record in progress:
        passages = library.search("local", [record.file_id], "Octave license", 3)
        found.append((record.pages_parsed, len(passages)))
        assert all(passage.page <= record.pages_parsed for passage in passages)
        if record.pages_parsed > 100:
            break
    progress.close()  # type: ignore[attr-defined]
    assert found[0] == (0, 0)
    assert any(pages <= 8 and passages for pages, passages in found)


def test_killed_ingest_resumes_at_the_next_page(tmp_path: Path, octave: Any) -> None:
    """kill -9 in the middle of a parse; the next process continues, and nothing differs from a straight run."""
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from perilune.memory.library import Library\nfrom perilune.memory.store import Store\n"
        f"home = Path({str(tmp_path)!r})\nlibrary = Library(Store(home), home)\n"
        f"with open({str(OCTAVE)!r}, 'rb') as data:\n"
        "    record = library.add_file('local', 'octave.pdf', 'assistants', data, 2**26)\n"
        "for record in library.parse('local', record.file_id):\n    print(record.pages_parsed, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 100:
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()

    store = Store(tmp_path)
    library = Library(store, tmp_path)
    (record,) = library.unfinished_files()
    assert record.status is FileStatus.PARSING
    assert 100 <= record.pages_parsed < 1158
    progress = list(library.parse("local", record.file_id))
    assert min(r.pages_parsed for r in progress) == record.pages_parsed
    assert progress[-1].status is FileStatus.PREFILLING
    straight = octave.library, octave.record.file_id
    assert library.text("local", record.file_id) == straight[0].text("local", straight[1])
    question = "How do I declare a persistent variable?"
    resumed = [(p.page, p.start) for p in library.search("local", [record.file_id], question, 5)]
    assert resumed == [(p.page, p.start) for p in straight[0].search("local", [straight[1]], question, 5)]
    store.close()


def test_deleted_while_parsed(library: Library, store: Store) -> None:
    with OCTAVE.open("rb") as data:
        record = library.add_file("local", "octave.pdf", "assistants", data, 64 * 1024**2)
    progress = library.parse("local", record.file_id)
    assert next(r for r in progress if r.pages_parsed)
    library.delete_file("local", record.file_id)
    with pytest.raises(NotFound):
        list(progress)
    assert rows(store, record.file_id) == 0


def test_kept_answers_that_quote_a_file_go_with_it(library: Library, store: Store) -> None:
    record, answers = add(library, TEXT, "moon.md"), ResponseStore(store)
    for body in (
        {"id": "quoting", "citations": [{"file_id": record.file_id, "quote": "The moon."}]},
        {"id": "plain"},
    ):
        answers.begin("local", [], body)
        assert answers.finish("local", Made(body))
    library.delete_file("local", record.file_id)
    with pytest.raises(NotFound):
        answers.get("local", "quoting")
    answers.get("local", "plain")


def test_one_parse_at_a_time(library: Library, store: Store, tmp_path: Path) -> None:
    with OCTAVE.open("rb") as data:
        record = library.add_file("local", "octave.pdf", "assistants", data, 64 * 1024**2)
    first = library.parse("local", record.file_id)
    next(first)
    with pytest.raises(Conflict):
        next(library.parse("local", record.file_id))
    # Another process can't know, but can't write twice either.
    elsewhere = Library(store, tmp_path).parse("local", record.file_id)
    assert next(r for r in elsewhere if r.pages_parsed)
    with pytest.raises(Conflict):
        list(first)
    elsewhere.close()  # type: ignore[attr-defined]


class Endless(io.RawIOBase):
    """A stream of unknown length, as an upload is."""

    def __init__(self, size: int) -> None:
        self.left, self.taken = size, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        part = min(self.left, size)
        self.left -= part
        self.taken += part
        return b"a" * part


def test_too_large_is_refused_before_it_is_stored(library: Library, tmp_path: Path) -> None:
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(500 * 1024**2)
    with huge.open("rb") as data, pytest.raises(TooLarge, match="256 MB"):
        library.add_file("local", "huge.txt", "assistants", data, 256 * 1024**2)
    assert not (tmp_path / "files").exists()
    stream = Endless(500 * 1024**2)
    with pytest.raises(TooLarge):
        library.add_file("local", "huge.txt", "assistants", stream, 4 * 1024**2)  # type: ignore[arg-type]
    assert stream.taken <= 5 * 1024**2
    assert library.list_files("local") == []
    assert not any(path.is_file() for path in (tmp_path / "files").rglob("*"))


def test_empty_is_refused(library: Library) -> None:
    with pytest.raises(UnsupportedDocument, match="empty"):
        add(library, b"")
    assert library.list_files("local") == []


def test_full_disk_is_a_clear_refusal(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(Overloaded, match="disk is full"):
            add(library, TEXT)
    assert not any(path.is_file() for path in (tmp_path / "files").rglob("*"))
    assert add(library, TEXT).size_bytes == len(TEXT)


def test_bytes_that_no_row_knows_are_swept(library: Library, tmp_path: Path) -> None:
    kept = add(library, TEXT)
    folder = next((tmp_path / "files").iterdir())
    old, fresh = folder / "file-orphan", folder / "file-fresh"
    for path in (old, fresh):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    library.unfinished_files()
    assert sorted(path.name for path in folder.iterdir()) == sorted([fresh.name, kept.file_id])


def test_lost_bytes_are_named(library: Library, tmp_path: Path) -> None:
    record = add(library, TEXT)
    next((tmp_path / "files").rglob("file-*")).unlink()
    with pytest.raises(IntegrityError):
        library.open_file("local", record.file_id)


def test_many_callers_at_once(library: Library) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def life(number: int) -> FileRecord:
        record = ingest(library, f"The secret word number {number} is zebra{number}.".encode(), f"{number}.txt")
        (passage,) = library.search("local", [record.file_id], f"zebra{number}", 3)
        assert f"zebra{number}" in passage.text
        return record

    with ThreadPoolExecutor(6) as pool:
        records = list(pool.map(life, range(12)))
    assert len({record.file_id for record in records}) == 12
    assert len(library.list_files("local")) == 12
