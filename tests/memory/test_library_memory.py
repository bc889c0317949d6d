"""The library with memory behind it: searches find by meaning, deletion reaches the index, faults are told."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perilune.core import FileStatus
from perilune.errors import NotFound
from perilune.memory.embed.process import ProcessEmbedder
from perilune.memory.library import Library
from perilune.memory.memory import Memory
from perilune.memory.retrieve import Found
from perilune.memory.scope import Scope
from perilune.memory.store import Store
from perilune.memory.vectors.lance import LanceIndex
from perilune.memory.vectors.protocol import Size
from tests.memory.conftest import ingest

LEASE = b"The landlord gives the security money back within thirty days.\fMiso is a kitten and likes tuna."


@pytest.fixture
def memory(store: Store, tmp_path: Path) -> Iterator[Memory]:
    embedder = ProcessEmbedder(query_s=20.0)
    opened = Memory(store, LanceIndex(tmp_path / "index", embedder.model, embedder.width), embedder)
    opened.start()
    yield opened
    opened.close()


def test_a_document_is_found_by_meaning_and_deleted_everywhere(
    store: Store, tmp_path: Path, memory: Memory
) -> None:
    library = Library(store, tmp_path, memory=memory)
    record, other = ingest(library, LEASE), ingest(library, b"A kitten is a young cat.")
    assert memory.settled()
    found = library.search("local", [record.file_id], "Which pet is there?", 2)
    assert "kitten" in found[0].text
    assert {passage.file_id for passage in found} == {record.file_id}
    assert library.text("local", record.file_id)[found[0].start : found[0].end] == found[0].text
    with pytest.raises(NotFound):
        library.search("stranger", [record.file_id], "kitten", 2)
    assert library.search_faults() == []
    library.delete_file("local", record.file_id)
    library.delete_file("local", other.file_id)
    assert memory.settled()
    assert memory._index.size() == Size(0, 0)


def test_a_dead_embedder_is_told(store: Store, tmp_path: Path) -> None:
    dead = ProcessEmbedder(command=(sys.executable, "-c", ""), query_s=0.2)
    memory = Memory(store, LanceIndex(tmp_path / "index", dead.model, dead.width), dead)
    memory._indexer.start()
    library = Library(store, tmp_path, memory=memory)
    record = ingest(library, LEASE)
    end_s = time.monotonic() + 20
    while not library.search_faults() and time.monotonic() < end_s:
        time.sleep(0.05)
    assert "embedder" in library.search_faults()[0]
    assert "kitten" in library.search("local", [record.file_id], "kitten", 2)[0].text
    memory.close()


def test_a_file_that_is_deleted_during_a_search_is_not_found(store: Store, tmp_path: Path) -> None:
    index = LanceIndex(tmp_path / "index", "none", 1)

    class Slow(Memory):
        def search(self, *given: Any, **more: Any) -> Found:
            found = super().search(*given, **more)
            library.delete_file("local", going.file_id)
            return found

    memory = Slow(store, index, None)
    library = Library(store, tmp_path, memory=memory)
    staying, going = ingest(library, LEASE), ingest(library, b"A kitten is a young cat.")
    found = library.search("local", [staying.file_id, going.file_id], "kitten", 5)
    assert {passage.file_id for passage in found} == {staying.file_id}
    memory.close()


def test_nothing_of_a_file_that_failed_is_found(store: Store, tmp_path: Path, memory: Memory) -> None:
    library = Library(store, tmp_path, memory=memory)
    record = ingest(library, LEASE)
    assert memory.settled()
    assert memory.search("kitten", Scope("local"), 5).hits
    library.set_status(replace(record, status=FileStatus.ERROR, error="Page 3 can't be read."))
    assert memory.search("kitten", Scope("local"), 5).hits == ()
    assert memory.settled()
    assert memory._index.size() == Size(0, 0)
    memory._indexer.suspect()  # as at the next start: files without entries get theirs
    assert memory.settled()
    assert memory._indexer.write_words() == 0
    assert memory.search("kitten", Scope("local"), 5).hits == ()
