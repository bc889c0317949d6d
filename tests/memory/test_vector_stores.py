"""Vector stores: sets of a tenant's files, their states, cursors, filters; nothing outlives its store or file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from perilune.core import AttributeCombination, AttributeComparison, AttributeFilter, AttributeValue
from perilune.errors import InvalidRequest, NotFound
from perilune.memory import vector_stores
from perilune.memory.attributes import matches
from perilune.memory.entries import remove_tenant
from perilune.memory.library import Library
from perilune.memory.paging import Part
from perilune.memory.schema import STORE_BATCHES, STORE_FILES, VECTOR_STORES
from perilune.memory.store import Store
from perilune.memory.vector_stores import DAY_S, Changes, FileCounts, NewStoreFile, VectorStore, VectorStores
from tests.memory.conftest import add, ingest


class Clock:
    """Moves on by a second a call."""

    now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stores(store: Store, clock: Clock) -> VectorStores:
    return VectorStores(store, clock)


def make(stores: VectorStores, *file_ids: str, tenant: str = "local", days: int | None = None) -> VectorStore:
    return stores.create(tenant, "notes", None, days, {"team": "blue"}, [NewStoreFile(each) for each in file_ids])


def rows(store: Store, table: sa.Table) -> int:
    with store.read() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


def test_made_read_changed_deleted(stores: VectorStores, store: Store, library: Library) -> None:
    file_id = ingest(library, b"The rent is 940 crowns. " * 200).file_id
    made = make(stores, file_id)
    assert stores.get("local", made.store_id) == made
    assert (made.name, made.metadata, made.counts) == ("notes", {"team": "blue"}, FileCounts(completed=1))
    assert made.usage_bytes > 0
    assert made.expires_at is None
    changed = stores.update("local", made.store_id, Changes(frozenset({"name", "expires_days"}), "other", 2))
    assert (changed.name, changed.metadata) == ("other", {"team": "blue"})
    assert changed.expires_at == changed.last_active_at + 2 * DAY_S
    stores.delete("local", made.store_id)
    assert [rows(store, table) for table in (VECTOR_STORES, STORE_FILES)] == [0, 0]
    assert library.get_file("local", file_id).file_id == file_id
    for call in (stores.get, stores.delete):
        with pytest.raises(NotFound):
            call("local", made.store_id)


def test_files_and_their_states(stores: VectorStores, library: Library) -> None:
    done, waiting = ingest(library, b"The rent is 940 crowns.").file_id, add(library, b"Later.").file_id
    broken = ingest(library, b"%PDF-1.4 broken").file_id
    made = make(stores, done)
    for file_id, state in ((waiting, "in_progress"), (broken, "failed")):
        assert stores.attach("local", made.store_id, NewStoreFile(file_id)).state == state
    assert stores.get("local", made.store_id).counts == FileCounts(1, 1, 1)
    assert stores.file("local", made.store_id, broken).error
    listed, more = stores.files("local", made.store_id, Part(), None)
    assert ([each.file_id for each in listed][2], more) == (done, False)
    assert {each.file_id for each in listed} == {done, waiting, broken}
    assert [each.file_id for each in stores.files("local", made.store_id, Part(), "failed")[0]] == [broken]
    assert set(stores.searchable("local", [made.store_id], None)) == {done, waiting}
    list(library.parse("local", waiting))
    assert stores.file("local", made.store_id, waiting).state == "completed"
    stores.detach("local", made.store_id, waiting)
    library.delete_file("local", done)
    assert stores.get("local", made.store_id).counts == FileCounts(failed=1)
    with pytest.raises(NotFound):
        stores.file("local", made.store_id, waiting)


def test_attributes_are_set_and_replaced(stores: VectorStores, library: Library) -> None:
    file_id = add(library, b"x").file_id
    made = make(stores)
    stores.attach("local", made.store_id, NewStoreFile(file_id, {"year": 2024, "draft": True}))
    assert stores.set_attributes("local", made.store_id, file_id, {"year": 2025.5}).attributes == {"year": 2025.5}
    assert stores.attach("local", made.store_id, NewStoreFile(file_id)).attributes == {}
    assert stores.get("local", made.store_id).counts.total == 1


def test_batches(stores: VectorStores, library: Library, store: Store) -> None:
    read, waiting = ingest(library, b"The rent is 940 crowns.").file_id, add(library, b"Later.").file_id
    made = make(stores)
    batch = stores.add_batch("local", made.store_id, [NewStoreFile(read, {"a": 1}), NewStoreFile(waiting)])
    assert (batch.counts, batch.cancelled) == (FileCounts(in_progress=1, completed=1), False)
    listed, _ = stores.files("local", made.store_id, Part(), None, batch.batch_id)
    assert {each.file_id for each in listed} == {read, waiting}
    cancelled = stores.cancel_batch("local", made.store_id, batch.batch_id)
    assert (cancelled.counts, cancelled.cancelled) == (FileCounts(completed=1, cancelled=1), True)
    list(library.parse("local", waiting))
    assert set(stores.searchable("local", [made.store_id], None)) == {read}
    other = stores.add_batch("local", made.store_id, [NewStoreFile(read)])
    assert not stores.cancel_batch("local", made.store_id, other.batch_id).cancelled  # there was nothing to cancel
    with pytest.raises(NotFound):
        stores.add_batch("local", made.store_id, [NewStoreFile(read), NewStoreFile("file-none")])
    with pytest.raises(NotFound):
        stores.batch("local", make(stores).store_id, batch.batch_id)
    stores.delete("local", made.store_id)
    assert [rows(store, table) for table in (STORE_BATCHES, STORE_FILES)] == [0, 0]


def test_a_store_expires_when_nobody_searches_it(stores: VectorStores, library: Library, clock: Clock) -> None:
    file_id = ingest(library, b"The rent is 940 crowns.").file_id
    made = make(stores, file_id, days=1)
    clock.now_s += DAY_S / 2
    stores.searchable("local", [made.store_id], None)
    active = stores.get("local", made.store_id).last_active_at
    assert active > made.last_active_at
    stores.searchable("local", [made.store_id], None)  # so soon after, it isn't noted
    assert stores.get("local", made.store_id).last_active_at == active
    clock.now_s += 0.9 * DAY_S
    assert stores.searchable("local", [made.store_id], None)
    clock.now_s += DAY_S
    uses: tuple[Callable[[], object], ...] = (
        lambda: stores.searchable("local", [made.store_id], None),
        lambda: stores.attach("local", made.store_id, NewStoreFile(file_id)),
        lambda: stores.add_batch("local", made.store_id, [NewStoreFile(file_id)]),
    )
    for use in uses:
        with pytest.raises(InvalidRequest, match="expired"):
            use()
    stores.update("local", made.store_id, Changes(frozenset({"expires_days"})))
    assert stores.searchable("local", [made.store_id], None)


def test_a_store_is_bounded(stores: VectorStores, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_stores, "MAX_FILES", 2)
    ids = [add(library, b"x").file_id for _ in range(3)]
    made = make(stores, *ids[:2])
    stores.attach("local", made.store_id, NewStoreFile(ids[0]))  # it is there
    with pytest.raises(InvalidRequest, match="at most 2"):
        stores.attach("local", made.store_id, NewStoreFile(ids[2]))


def test_parts(stores: VectorStores) -> None:
    ids = [make(stores).store_id for _ in range(5)][::-1]
    found, more = stores.part("local", Part(2))
    assert ([each.store_id for each in found], more) == (ids[:2], True)
    found, more = stores.part("local", Part(9, after=ids[1]))
    assert ([each.store_id for each in found], more) == (ids[2:], False)
    with pytest.raises(InvalidRequest):
        stores.part("other", Part(after=ids[0]))


def test_tenants_never_meet(stores: VectorStores, store: Store, library: Library) -> None:
    mine, theirs = add(library, b"x").file_id, add(library, b"y", tenant="other").file_id
    made = make(stores, mine)
    batch = stores.add_batch("local", made.store_id, [NewStoreFile(mine)])
    at, new = made.store_id, NewStoreFile(theirs)
    attempts: tuple[Callable[[], object], ...] = (
        lambda: stores.get("other", at),
        lambda: stores.update("other", at, Changes(frozenset())),
        lambda: stores.delete("other", at),
        lambda: stores.attach("other", at, new),
        lambda: stores.attach("local", at, new),
        lambda: stores.file("other", at, mine),
        lambda: stores.files("other", at, Part(), None),
        lambda: stores.set_attributes("other", at, mine, {}),
        lambda: stores.detach("other", at, mine),
        lambda: stores.add_batch("other", at, [new]),
        lambda: stores.batch("other", at, batch.batch_id),
        lambda: stores.cancel_batch("other", at, batch.batch_id),
        lambda: stores.searchable("other", [at], None),
        lambda: make(stores, theirs),
    )
    for attempt in attempts:
        with pytest.raises(NotFound):
            attempt()
    assert stores.part("other", Part())[0] == []
    assert stores.get("local", at).counts.total == 1
    kept = make(stores, theirs, tenant="other")
    with store.write() as connection:
        remove_tenant(connection, "local")
    assert stores.get("other", kept.store_id) == kept
    assert rows(store, STORE_FILES) == 1


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (AttributeComparison("year", "eq", 2024), {"a"}),
        (AttributeComparison("year", "eq", "2024"), set()),
        (AttributeComparison("year", "ne", 2024), {"b", "c"}),
        (AttributeComparison("year", "gt", 2024), {"b"}),
        (AttributeComparison("year", "lte", 2024.0), {"a"}),
        (AttributeComparison("year", "gte", "a"), set()),
        (AttributeComparison("draft", "eq", True), {"b"}),
        (AttributeComparison("draft", "eq", 1), set()),
        (AttributeComparison("draft", "gt", False), set()),
        (AttributeComparison("city", "lt", "Oslo"), {"a"}),
        (AttributeComparison("city", "in", ("Bonn", "Oslo")), {"a", "b"}),
        (AttributeComparison("city", "nin", ("Bonn",)), {"b", "c"}),
        (
            AttributeCombination(
                "or", (AttributeComparison("city", "eq", "Bonn"), AttributeComparison("year", "gt", 2024))
            ),
            {"a", "b"},
        ),
        (
            AttributeCombination(
                "and", (AttributeComparison("city", "eq", "Bonn"), AttributeComparison("year", "gt", 2024))
            ),
            set(),
        ),
    ],
)
def test_filters(stores: VectorStores, library: Library, wanted: AttributeFilter, found: set[str]) -> None:
    made = make(stores)
    noted: dict[str, dict[str, AttributeValue]] = {
        "a": {"year": 2024, "city": "Bonn"},
        "b": {"year": 2025, "draft": True, "city": "Oslo"},
        "c": {},
    }
    names = {}
    for name, attributes in noted.items():
        names[add(library, name.encode()).file_id] = name
        stores.attach("local", made.store_id, NewStoreFile(list(names)[-1], attributes))
    assert {names[each] for each in stores.searchable("local", [made.store_id], wanted)} == found


values = st.one_of(st.booleans(), st.integers(-3, 3), st.floats(-3, 3), st.sampled_from(["a", "b", "é"]))


@given(st.dictionaries(st.sampled_from("xy"), values), st.sampled_from("xy"), values)
def test_a_comparison_and_its_opposite(
    attributes: dict[str, AttributeValue], key: str, value: AttributeValue
) -> None:
    assert matches(AttributeComparison(key, "eq", value), attributes) is not matches(
        AttributeComparison(key, "ne", value), attributes
    )
    assert matches(AttributeComparison(key, "in", (value,)), attributes) is not matches(
        AttributeComparison(key, "nin", (value,)), attributes
    )
    below, above = (matches(AttributeComparison(key, kind, value), attributes) for kind in ("lt", "gte"))  # type: ignore[arg-type]
    assert not (below and above)


def test_the_file_of_a_migrated_database(tmp_path: Path) -> None:
    """A file that goes takes its places in every store along."""
    store = Store(tmp_path)
    library, stores = Library(store, tmp_path), VectorStores(store)
    file_id = add(library, b"x").file_id
    made = [make(stores, file_id) for _ in range(2)]
    library.delete_file("local", file_id)
    assert [stores.get("local", each.store_id).counts.total for each in made] == [0, 0]
    store.close()
