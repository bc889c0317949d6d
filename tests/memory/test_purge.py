"""What is deleted is in no file of the home folder and in no table: every byte is searched, packed ones, too."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from perilune.config import MemorySettings
from perilune.memory.library import Library
from perilune.memory.memory import INDEX_FOLDER, Memory, Turn
from perilune.memory.schema import AUDIT
from perilune.memory.scope import Scope
from perilune.memory.sessions import Sessions
from perilune.memory.store import Store
from tests.memory.conftest import add

MARK = "Quetzalmarker"
"""A name, so that it becomes an entity, too: the only text of an entry that an index keeps as it is."""

OTHER = "Ordinaryperson"
WAIT_S = 120.0


def holding(home: Path, marker: str) -> list[str]:
    """Files under `home` that hold the marker in any of the usual forms."""
    forms = {form for text in (marker, marker.lower()) for form in (text.encode(), text.encode("utf-16-le"))}
    return [
        str(path.relative_to(home))
        for path in home.rglob("*")
        if any(form in data for data in _readings(_bytes(path)) for form in forms)
    ]


def _bytes(path: Path) -> bytes:
    """Nothing of a folder, nor of a file that a server at work takes away just now."""
    try:
        return path.read_bytes() if path.is_file() else b""
    except FileNotFoundError:
        return b""


def _readings(data: bytes) -> Iterator[bytes]:
    """The bytes, and what zlib, gzip or zstd made them of, wherever such a stream begins."""
    yield data
    for magic, wbits in ((b"\x78\x01", 15), (b"\x78\x9c", 15), (b"\x78\xda", 15), (b"\x1f\x8b", 31)):
        at = data.find(magic)
        while at >= 0:
            with contextlib.suppress(zlib.error):
                yield zlib.decompressobj(wbits).decompress(data[at : at + 65_536])
            at = data.find(magic, at + 1)
    import pyarrow as pa

    at = data.find(b"\x28\xb5\x2f\xfd")
    while at >= 0:
        with contextlib.suppress(OSError, pa.ArrowException):
            yield pa.CompressedInputStream(pa.BufferReader(data[at:]), "zstd").read(1 << 20)
        at = data.find(b"\x28\xb5\x2f\xfd", at + 1)


def versions_with(folder: Path, marker: str) -> list[str]:
    """Versions of LanceDB's tables that hold the marker, read as LanceDB reads them: it packs in its own way."""
    import lancedb

    database, found = lancedb.connect(folder), []
    for name in database.list_tables().tables:
        table = database.open_table(name)
        for version in [each["version"] for each in table.list_versions()]:
            table.checkout(version)
            if marker.lower() in repr(table.to_arrow().to_pylist()).lower():
                found.append(f"{name} {version}")
    return found


def rows_with(store: Store, marker: str) -> list[str]:
    """Tables of the database that hold the marker, whatever they are called."""
    with store.read() as connection:
        names = sa.inspect(connection).get_table_names()
        return [
            name
            for name in names
            if any(
                marker.lower() in repr(tuple(row)).lower()
                for row in connection.execute(sa.text(f'SELECT * FROM "{name}"'))
            )
        ]


class Home:
    """A home folder as a server has it: two documents and two sessions, one of each with the marker."""

    def __init__(self, folder: Path, settings: MemorySettings) -> None:
        self.folder = folder
        self.store = Store(folder)
        self.memory = Memory.open(self.store, folder, settings)
        self.memory.start()
        self.library = Library(self.store, folder, memory=self.memory)
        self.sessions = Sessions(self.store, self.memory)

    def fill(self) -> tuple[str, str]:
        """Returns the ids of the marked document and session."""
        ids = []
        for name in (MARK, OTHER):
            text = "\n\n".join(f"Clause {at}. Mr {name} owes {name} Bank {at} crowns." for at in range(80))
            record = add(self.library, text.encode(), f"{name}.txt")
            list(self.library.parse("local", record.file_id))
            session = f"talk of {name}"
            for at in range(30):
                said = Turn(name, f"I am {name}, and my number is {at}.", 1.7e9 + at)
                self.memory.add_turns("local", session, [said, Turn("assistant", f"Hello {name}! " * (9 * at))])
            ids += [record.file_id, session]
        return ids[0], ids[1]

    def close(self) -> None:
        self.memory.close()
        self.store.close()

    def found(self, marker: str) -> list[str]:
        assert self.memory.settled(WAIT_S)
        hits = self.memory.search(f"What does {marker} owe?", Scope("local"), 50).hits
        return [hit.text for hit in hits if marker in hit.text]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    opened = Home(tmp_path, MemorySettings(embedder="wordllama"))
    yield opened
    opened.close()


@pytest.mark.timeout(300)
def test_nothing_of_what_is_deleted_stays_in_any_file(home: Home) -> None:
    file_id, session = home.fill()
    assert home.found(MARK)
    assert versions_with(home.folder / INDEX_FOLDER, MARK)
    assert {name.split("/")[0] for name in holding(home.folder, MARK)} >= {"perilune.db-wal", "files", "index"}
    home.library.delete_file("local", file_id)
    home.sessions.delete("local", session)
    assert home.found(MARK) == []
    assert home.memory.purged(WAIT_S)
    assert rows_with(home.store, MARK) == []
    assert holding(home.folder, MARK) == []
    assert versions_with(home.folder / INDEX_FOLDER, MARK) == []
    assert versions_with(home.folder / INDEX_FOLDER, OTHER)
    assert home.found(OTHER)
    assert rows_with(home.store, OTHER)


@pytest.mark.timeout(300)
def test_a_purge_that_a_kill_prevented_is_done_at_the_next_start(tmp_path: Path) -> None:
    first = Home(tmp_path, MemorySettings(embedder="off"))
    file_id, session = first.fill()
    assert first.found(MARK)
    first.memory.close()
    first.library.delete_file("local", file_id)
    first.sessions.delete("local", session)
    first.store.close()
    assert holding(tmp_path, MARK)
    second = Home(tmp_path, MemorySettings(embedder="wordllama"))  # with another model: its tables go, too
    try:
        assert second.memory.purged(WAIT_S)
        assert holding(tmp_path, MARK) == []
        assert versions_with(tmp_path / INDEX_FOLDER, MARK) == []
        assert second.found(OTHER)
    finally:
        second.close()


def test_the_audit_names_no_session(home: Home) -> None:
    home.memory.add_turns("local", MARK, [Turn("user", "Hello.")])
    home.sessions.delete("local", MARK)
    with home.store.read() as connection:
        (subject,) = connection.execute(sa.select(AUDIT.c.subject)).scalars()
    assert subject.startswith("session-")


@pytest.mark.timeout(300)
def test_a_tenant_that_is_forgotten_leaves_no_row_but_the_audit(home: Home) -> None:
    home.fill()
    home.memory.add_turns("other", "talk", [Turn("user", f"I am not {OTHER}.")])
    for file in home.library.list_files("local"):
        home.library.delete_file("local", file.file_id)
    assert sorted(home.sessions.forget_tenant("local")) == [f"talk of {OTHER}", f"talk of {MARK}"]
    assert home.memory.purged(WAIT_S)
    assert set(rows_with(home.store, "'local'")) == {"audit"}
    assert rows_with(home.store, "'other'")
    assert holding(home.folder, MARK) == []
    assert home.memory._index.size().texts == 1
    assert len(home.memory.search(OTHER, Scope("other"), 5).hits) == 1
