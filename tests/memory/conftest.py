"""A store, a library and two real manuals, parsed once a session."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from perilune.core import FileRecord
from perilune.memory.library import Library
from perilune.memory.schema import METADATA
from perilune.memory.store import Store

OCTAVE = Path("/usr/share/doc/octave/octave.pdf")
DEBIAN_ZH = Path("/usr/share/debian-reference/debian-reference.zh-cn.pdf")
MAX_BYTES = 64 * 1024**2


DATABASES = ("sqlite", "postgresql")
ON_BOTH = frozenset(
    f"tests.memory.test_{room}"
    for room in (
        "audit",
        "batches",
        "keys",
        "locality",
        "profile",
        "ratings",
        "resident",
        "responses",
        "session_rows",
        "store_contract",
        "uploads",
        "vector_stores",
    )
)
"""The rooms of the store: what they promise, they promise on every database."""

SQLITES_OWN = frozenset(
    (
        "test_nothing_stored_opens_the_door",  # reads the files
        "test_a_known_key_is_found_at_once_until_anything_is_written",  # only SQLite tells at once
    )
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    both = metafunc.module.__name__ in ON_BOTH and metafunc.function.__name__ not in SQLITES_OWN
    if both and "database" in metafunc.fixturenames:
        metafunc.parametrize("database", DATABASES, indirect=True)


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database: none is SQLite's own file in the home folder."""
    if getattr(request, "param", DATABASES[0]) == DATABASES[0]:
        return ""
    url: str = request.getfixturevalue("postgres")
    emptied(url)
    return url


def emptied(url: str) -> None:
    """Take every row of a database that may have tables."""
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        there = sa.inspect(connection).get_table_names()
        names = ", ".join(table.name for table in METADATA.sorted_tables if table.name in there)
        if names:
            connection.execute(sa.text(f"TRUNCATE {names} RESTART IDENTITY CASCADE"))
    engine.dispose()


@pytest.fixture
def store(tmp_path: Path, database: str) -> Iterator[Store]:
    opened = Store(tmp_path, database)
    yield opened
    opened.close()


@pytest.fixture
def library(store: Store, tmp_path: Path) -> Library:
    return Library(store, tmp_path)


def add(library: Library, data: bytes, name: str = "notes.txt", tenant: str = "local") -> FileRecord:
    return library.add_file(tenant, name, "assistants", io.BytesIO(data), MAX_BYTES)


def ingest(library: Library, data: bytes, name: str = "notes.txt", tenant: str = "local") -> FileRecord:
    """Add and parse; the last record."""
    record = add(library, data, name, tenant)
    return list(library.parse(tenant, record.file_id))[-1]


class Manual:
    """A real document in a library of its own."""

    def __init__(self, library: Library, record: FileRecord, progress: list[FileRecord]) -> None:
        self.library = library
        self.record = record
        self.progress = progress

    def pages(self, question: str, limit: int = 3) -> list[int]:
        found = self.library.search("local", [self.record.file_id], question, limit)
        return [passage.page for passage in found]


def manual(home: Path, path: Path) -> Iterator[Manual]:
    assert path.exists(), f"{path} is missing: apt-get install octave-doc debian-reference-zh-cn"
    store = Store(home)
    library = Library(store, home)
    with path.open("rb") as data:
        added = library.add_file("local", path.name, "assistants", data, MAX_BYTES)
    progress = list(library.parse("local", added.file_id))
    yield Manual(library, progress[-1], progress)
    store.close()


@pytest.fixture(scope="session")
def octave(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manual]:
    yield from manual(tmp_path_factory.mktemp("octave"), OCTAVE)


@pytest.fixture(scope="session")
def debian_zh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manual]:
    yield from manual(tmp_path_factory.mktemp("debian"), DEBIAN_ZH)
