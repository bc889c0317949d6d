"""A store, a library and two real manuals, parsed once a session."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from perilune.core import FileRecord
from perilune.memory.library import Library
from perilune.memory.store import Store

OCTAVE = Path("/usr/share/doc/octave/octave.pdf")
DEBIAN_ZH = Path("/usr/share/debian-reference/debian-reference.zh-cn.pdf")
MAX_BYTES = 64 * 1024**2


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path)
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
