"""What is kept in memory proposes what a scan of SQL would, and follows what is written and deleted."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from perilune.memory import entries, resident, scoring
from perilune.memory.indexer import decode
from perilune.memory.memory import Memory, Turn
from perilune.memory.resident import Resident
from perilune.memory.schema import ENTRIES
from perilune.memory.scope import Scope
from perilune.memory.store import Store
from perilune.memory.vectors.lance import LanceIndex
from perilune.memory.vectors.protocol import Terms

MODEL, WIDTH = "made", 96
SCOPES = (
    Scope("acme"),
    Scope("other"),
    Scope("nobody"),
    Scope("acme", sources=("s1", "s3", "s9")),
    Scope("acme", sources=()),
    Scope("acme", speakers=("Ann", "Bob")),
    Scope("acme", since_s=300.0, until_s=900.0),
    Scope("acme", numbers=(10, 40), sources=("s0", "s2")),
    Scope("acme", pages=(2, 3)),
    Scope("acme", entities=("paris", "rome")),
    Scope("acme", speakers=("Ann",), since_s=100.0, entities=("paris",)),
)


def unit(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Vectors around a common direction, as an embedder's are."""
    found = 3 + rng.standard_normal((rows, WIDTH)).astype(np.float32)
    normal: np.ndarray = (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)
    return normal


def put(store: Store, tenant: str, source: str, count: int, seed: int, with_vectors: bool = True) -> None:
    rng = np.random.default_rng(seed)
    new = []
    for number in range(count):
        terms = Counter(int(term) for term in rng.zipf(1.4, 12) % 60 + 1)
        odd = number % 2
        new.append(
            entries.NewEntry(
                source,
                number,
                {term << 50: times for term, times in terms.items()},  # hashes fill 64 bits
                sum(terms.values()),
                page=number % 5 if odd else None,
                start=0 if odd else None,
                end=1 if odd else None,
                text=None if odd else f"{number}",
                speaker=("Ann", "Bob", "Eve", None)[number % 4],
                at=None if number % 7 == 0 else 10.0 * number,
                entities=(("paris",), ("rome", "oslo"), ())[number % 3],
            )
        )
    with store.write() as connection:
        entries.add(connection, tenant, new)
        if with_vectors:
            ids = sorted(entries.pending(connection, "vector", 10**6))
            entries.store_vectors(connection, ids, MODEL, unit(rng, len(ids)))
            entries.settle(connection, "vector", ids)


def filled(store: Store, tenant: str, **more: int) -> Resident:
    made = Resident(store, MODEL, WIDTH, **more)
    until_s = time.monotonic() + 30
    while not made.ready(tenant, total(store, tenant)) and time.monotonic() < until_s:
        time.sleep(0.01)
    return made


def total(store: Store, tenant: str) -> int:
    with store.read() as connection:
        return entries.statistics(connection, tenant, ()).entries


def exact(store: Store, scope: Scope) -> tuple[list[int], np.ndarray, np.ndarray]:
    """(ids, BM25 of terms 1, 2 and 9, vectors) of every entry in scope, read from SQL."""
    with store.read() as connection:
        found = [entry for part in entries.scan(connection, scope, MODEL) for entry in part]
    counts = scoring.frequencies([entry.terms for entry in found], list(ASKED.weights))
    scores = scoring.bm25(counts, [entry.length for entry in found], list(ASKED.weights.values()), 12.0)
    vectors = decode([entry.vector or b"" for entry in found], WIDTH) if found else np.zeros((0, WIDTH), np.float32)
    return [entry.id for entry in found], scores, vectors


ASKED = Terms({1 << 50: 1.0, 2 << 50: 1.7, 9 << 50: 3.0, 99 << 40: 2.0}, 12.0)


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_it_proposes_what_a_scan_finds(store: Store, scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "_READ", 37)  # many segments, and joined ones
    for number in range(4):
        put(store, "acme", f"s{number}", 60, number)
    put(store, "other", "s1", 30, 9)
    made = filled(store, "acme")
    ids, scores, vectors = exact(store, scope)
    by_id = dict(zip(ids, scores.tolist(), strict=True))
    words = made.words(ASKED, 1_000, scope)
    assert sorted(words) == sorted(each for each in ids if by_id[each] > 0)
    assert [round(by_id[each], 4) for each in words] == sorted((round(by_id[e], 4) for e in words), reverse=True)
    assert made.words(ASKED, 5, scope) == words[:5] or len({round(by_id[e], 5) for e in words[:6]}) < 6
    question = unit(np.random.default_rng(5), 1)[0]
    near = made.nearest(question, 10, scope)
    best = sorted(ids, key=lambda each: -float(vectors[ids.index(each)] @ question))[:10]
    assert len(near) == len(best)
    assert len(set(near) & set(best)) >= len(best) - 1  # bytes, not floats


def test_the_bits_find_most_of_what_is_nearest(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "CLOSE_ROWS", 300)
    put(store, "acme", "s", 1_500, 3)
    made = filled(store, "acme")
    ids, _, vectors = exact(store, Scope("acme"))
    shares = []
    for question in vectors[:20] + 0.02 * np.random.default_rng(1).standard_normal((20, WIDTH)).astype(np.float32):
        best = {ids[at] for at in np.argsort(-(vectors @ question))[:20]}
        shares.append(len(best & set(made.nearest(question, 20, Scope("acme")))) / 20)
    assert np.mean(shares) >= 0.7


def test_it_follows_what_is_written_and_deleted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "LET_GO_EVERY_S", 0.0)
    monkeypatch.setattr(resident, "VECTORS_EVERY_S", 0.0)
    put(store, "acme", "s0", 20, 0)
    made = filled(store, "acme")
    put(store, "acme", "s1", 20, 1, with_vectors=False)
    assert made.ready("acme", 40)  # at once
    one = Scope("acme", sources=("s1",))
    assert made.words(ASKED, 50, one)
    assert made.nearest(unit(np.random.default_rng(0), 1)[0], 5, one) == []
    with store.write() as connection:  # they come later
        ids = sorted(entries.pending(connection, "vector", 100))
        entries.store_vectors(connection, ids, MODEL, unit(np.random.default_rng(2), len(ids)))
    assert made.ready("acme", 40)
    assert len(made.nearest(unit(np.random.default_rng(0), 1)[0], 5, one)) == 5
    with store.write() as connection:
        entries.remove_source(connection, "acme", "s0")
    assert made.ready("acme", 20)
    until_s = time.monotonic() + 30
    while len(made.nearest(unit(np.random.default_rng(0), 1)[0], 50, Scope("acme"))) > 20:
        assert time.monotonic() < until_s  # forgotten in the background
        time.sleep(0.01)
    assert made.words(ASKED, 50, Scope("acme", sources=("s0",))) == []
    assert len(made.nearest(unit(np.random.default_rng(0), 1)[0], 50, Scope("acme"))) == 20


def give_vectors(store: Store, source: str) -> None:
    with store.write() as connection:
        query = sa.select(ENTRIES.c.id).where(ENTRIES.c.source_id == source).order_by(ENTRIES.c.id)
        ids = list(connection.execute(query).scalars())
        entries.store_vectors(connection, ids, MODEL, unit(np.random.default_rng(2), len(ids)))


def test_vectors_come_although_newer_entries_never_get_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local-only source has none where the embedder is on another machine."""
    for name in ("VECTORS_EVERY_S", "ALL_VECTORS_EVERY_S"):
        monkeypatch.setattr(resident, name, 0.0)
    monkeypatch.setattr(resident, "_MAX_WAITING", 10)
    put(store, "acme", "s0", 35, 0, with_vectors=False)
    put(store, "acme", "kept", 25, 1, with_vectors=False)
    made = filled(store, "acme")
    give_vectors(store, "s0")
    question, until_s = unit(np.random.default_rng(0), 1)[0], time.monotonic() + 20
    while len(made.nearest(question, 60, Scope("acme"))) < 35:
        assert made.ready("acme", 60)
        assert time.monotonic() < until_s, "vectors of older entries were never read"
        time.sleep(0.01)


def test_asking_for_vectors_reads_only_those_that_lack(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "VECTORS_EVERY_S", 0.0)
    put(store, "acme", "kept", 1, 0, with_vectors=False)
    put(store, "acme", "s0", 300, 0, with_vectors=False)
    give_vectors(store, "s0")
    put(store, "acme", "late", 1, 0, with_vectors=False)
    made = filled(store, "acme")
    assert len(made.nearest(unit(np.random.default_rng(0), 1)[0], 400, Scope("acme"))) == 300
    asked: list[tuple[str, object]] = []
    note = lambda _c, _cursor, statement, values, *_: asked.append((statement, values))  # noqa: E731
    sa.event.listen(store._engine, "before_cursor_execute", note)
    assert made.ready("acme", 302)
    sa.event.remove(store._engine, "before_cursor_execute", note)
    mine = [each for each in asked if "FROM vectors" in each[0]]
    assert mine
    with store.read() as connection:
        assert not [row for each in mine for row in connection.exec_driver_sql(*each)]  # type: ignore[arg-type]


def test_a_mean_that_changes_while_segments_are_joined(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "acme", "s0", 60, 0)
    made = filled(store, "acme")
    for number in (1, 2):
        put(store, "acme", f"s{number}", 10, number)
        assert made.ready("acme", 60 + 10 * number)
    real, changed = resident.joined, []

    def joined(*given: Any) -> resident.Segment:
        found = real(*given)
        if not changed:
            changed.append(made._recentre(np.zeros(WIDTH, np.float32), 1_000))
        return found

    monkeypatch.setattr(resident, "joined", joined)
    while made._join():
        pass
    assert changed
    assert len(made._segments) == 2
    ids, _, vectors = exact(store, Scope("acme"))
    question = unit(np.random.default_rng(5), 1)[0]
    best = sorted(ids, key=lambda each: -float(vectors[ids.index(each)] @ question))[:40]
    assert len(set(best) & set(made.nearest(question, 40, Scope("acme")))) >= 38


def test_as_much_that_is_new_as_was_deleted_is_found(store: Store) -> None:
    """Another document instead of one: how many there are tells nothing."""
    put(store, "acme", "s0", 20, 0)
    made = filled(store, "acme")
    with store.write() as connection:
        entries.remove_source(connection, "acme", "s0")
    put(store, "acme", "s1", 20, 1)
    assert made.ready("acme", 20)
    assert made.words(ASKED, 50, Scope("acme", sources=("s1",)))


def test_what_another_process_wrote_late_under_earlier_ids_is_found(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL gives ids before it commits: what is newer may be there first."""
    monkeypatch.setattr(resident, "LET_GO_EVERY_S", 0.0)
    for number in range(3):
        put(store, "acme", f"s{number}", 10, number)
    with store.write() as connection:
        late = connection.execute(sa.select(ENTRIES).where(ENTRIES.c.source_id == "s1")).mappings().all()
        connection.execute(ENTRIES.delete().where(ENTRIES.c.source_id == "s1"))
    made = Resident(store, MODEL, WIDTH)
    until_s = time.monotonic() + 30
    while not made.ready("acme", 20):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    with store.write() as connection:
        connection.execute(ENTRIES.insert(), [dict(row) for row in late])
    while not made.ready("acme", 30):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert made.words(ASKED, 50, Scope("acme", sources=("s1",)))


def test_a_search_does_not_wait_for_much_that_is_new(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "SOON", 5)
    put(store, "acme", "s0", 10, 0)
    made = filled(store, "acme")
    put(store, "acme", "s1", 30, 1)
    assert not made.ready("acme", 40)
    until_s = time.monotonic() + 30
    while not made.ready("acme", 40) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert len(made.words(Terms(ASKED.weights, 12.0), 50, Scope("acme", sources=("s1",)))) > 20
    made.close()
    assert not made.ready("acme", 40)


def test_it_is_not_ready_where_there_is_too_much(store: Store) -> None:
    put(store, "acme", "s0", 20, 0)
    assert not Resident(store, MODEL, WIDTH, most=10).ready("acme", 20)
    made = filled(store, "acme", most=30)
    assert made.ready("acme", 20)
    put(store, "acme", "s1", 20, 1)
    assert not made.ready("acme", 40)
    put(store, "other", "s1", 5, 1)
    assert not made.ready("other", 5)  # nothing of it is in memory any more


def test_a_search_asks_it_and_not_the_index(tmp_path: Path, store: Store) -> None:
    class Untouched(LanceIndex):
        def words(self, *_: object) -> list[int]:
            raise AssertionError("the index was asked")

    memory = Memory(store, Untouched(tmp_path / "index", "none", 1), None, resident=(made := Resident(store)))
    memory.add_turns("acme", "trip", [Turn("Ann", "The ferry to Oslo leaves at nine.", 5.0)])
    until_s = time.monotonic() + 30
    while not made.ready("acme", 1) and time.monotonic() < until_s:
        time.sleep(0.01)
    memory.add_turns("acme", "trip", [Turn("Bob", "My bicycle stands behind the harbour office.", 6.0)])
    found = memory.search("where is the bicycle", Scope("acme"), 5)  # what was said a moment ago
    assert found.hits[0].text.startswith("My bicycle")
    memory.close()
