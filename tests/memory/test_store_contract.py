"""What the store promises, on SQLite and on a real PostgreSQL server: transactions, migrations, and a whole life of
documents, sessions, answers, keys and usage."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from perilune.core import KeptAnswer, SessionTurn, Span
from perilune.errors import ConfigError
from perilune.memory import audit, entries
from perilune.memory import store as module
from perilune.memory.indexer import Indexer
from perilune.memory.keys import Keyring
from perilune.memory.library import Library
from perilune.memory.memory import Memory
from perilune.memory.paging import Part
from perilune.memory.ratings import Chosen, NewRating, Ratings
from perilune.memory.responses import Made, ResponseStore
from perilune.memory.schema import HEAD, METADATA, TENANTS
from perilune.memory.sessions import Sessions
from perilune.memory.store import DATABASE_FILE, Store, alembic_settings
from perilune.memory.usage import UsageStore, Used
from perilune.memory.vector_stores import NewStoreFile, VectorStores
from perilune.memory.vectors.lance import LanceIndex
from tests.memory.conftest import ingest

RENT = "The rent of the mill is 940 crowns a month."


@pytest.fixture
def memory(store: Store, tmp_path: Path) -> Iterator[Memory]:
    index = LanceIndex(tmp_path / "index", "none", 1)
    opened = Memory(store, index, None, indexer=Indexer(store, index, None))
    yield opened
    opened.close()


def new_tenant(store: Store, name: str = "a") -> None:
    with store.write() as connection:
        connection.execute(TENANTS.insert().values(id=name, secret=b"x" * 32, created_at=0.0))


# -------------------------------------------------------------------------------------------------- transactions


def test_migrations_make_the_tables(store: Store) -> None:
    with store.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    assert store.version() == HEAD


def test_a_reader_sees_one_state(store: Store) -> None:
    count = sa.select(sa.func.count()).select_from(TENANTS)
    with store.read() as connection:
        assert connection.execute(count).scalar() == 0
        new_tenant(store)
        assert connection.execute(count).scalar() == 0
    with store.read() as connection:
        assert connection.execute(count).scalar() == 1


def test_writers_that_read_first_lose_nothing(store: Store) -> None:
    new_tenant(store)
    errors: list[Exception] = []

    def count_up() -> None:
        try:
            for _ in range(10):
                with store.write() as connection:
                    value = connection.execute(sa.select(TENANTS.c.created_at)).scalar_one()
                    connection.execute(TENANTS.update().values(created_at=value + 1))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=count_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with store.read() as connection:
        assert connection.execute(sa.select(TENANTS.c.created_at)).scalar_one() == 40


def test_writers_of_many_rows_dont_lock_each_other_out(store: Store) -> None:
    """Term counts are upserted in whatever order texts have them."""
    texts = [dict.fromkeys(range(at, at + 60), 1) for at in (0, 30, 10)]

    def write(name: str) -> None:
        for at, terms in enumerate(texts[:: 1 if name == "a" else -1]):
            with store.write() as connection:
                entries.add(connection, "local", [entries.NewEntry(f"{name}{at}", 0, terms, 60, text="x")])

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with store.read() as connection:
        known = entries.statistics(connection, "local", [35])
    assert (known.entries, known.holders) == (9, {35: 9})


def test_exception_undoes_everything(store: Store) -> None:
    def fail() -> None:
        with store.write() as connection:
            connection.execute(TENANTS.insert().values(id="a", secret=b"x" * 32, created_at=0.0))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with store.read() as connection:
        assert connection.execute(sa.select(TENANTS)).first() is None


def test_a_newer_database_is_refused(store: Store, tmp_path: Path, database: str) -> None:
    with store.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConfigError, match="newer Perilune"):
        Store(tmp_path, database)
    with store.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = :head"), {"head": HEAD})


def test_a_server_that_is_away_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be opened"):
        Store(tmp_path, f"postgresql://nobody@/none?host={tmp_path}")


def test_stores_that_open_together_migrate_once(tmp_path: Path, database: str) -> None:
    unmade(database)
    opened: list[Store] = []
    homes = [tmp_path / name for name in "ab"] if database else [tmp_path] * 2  # two machines, one server
    threads = [threading.Thread(target=lambda home=home: opened.append(Store(home, database))) for home in homes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.version() for each in opened] == [HEAD, HEAD]
    for each in opened:
        each.close()


def test_a_new_file_that_others_have_open_is_waited_for(tmp_path: Path) -> None:
    """They hold it for a moment while they make it. SQLite's switch to WAL doesn't wait for them by itself."""
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE_FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(Store, tmp_path)
            with pytest.raises(TimeoutError):
                opening.result(0.3)
            other.execute("COMMIT")
            opened = opening.result(60)
    assert opened.version() == HEAD
    opened.close()


def test_a_file_that_stays_locked_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUSY_TIMEOUT_MS", 50)
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE_FILE, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ConfigError, match="database is locked"):
            Store(tmp_path)


def unmade(database: str) -> None:
    """A server's database without tables; SQLite's isn't there yet."""
    if database:
        engine = sa.create_engine(sa.make_url(database).set(drivername="postgresql+psycopg"))
        with engine.begin() as connection:
            connection.execute(sa.text("DROP SCHEMA public CASCADE"))
            connection.execute(sa.text("CREATE SCHEMA public"))
        engine.dispose()


def test_every_older_version_is_upgraded(tmp_path: Path, database: str) -> None:
    found = ScriptDirectory.from_config(alembic_settings()).walk_revisions()
    revisions = [each.revision for each in found][:0:-1]  # the first one first, without the last
    for revision in revisions:
        unmade(database)
        home = tmp_path / revision
        at_revision(home, database, revision)
        upgraded = Store(home, database)
        assert upgraded.version() == HEAD
        with upgraded.read() as connection:
            assert connection.execute(sa.select(TENANTS.c.id)).scalars().all() == ["old"]
        upgraded.close()


def at_revision(home: Path, database: str, revision: str) -> None:
    """A database as that version made it, with a tenant in it."""
    home.mkdir()
    engine = sa.create_engine(
        sa.make_url(database).set(drivername="postgresql+psycopg") if database else f"sqlite:///{home}/perilune.db"
    )
    with engine.begin() as connection:
        settings = alembic_settings()
        settings.attributes["connection"] = connection
        command.upgrade(settings, revision)
        connection.execute(TENANTS.insert().values(id="old", secret=b"x" * 32, created_at=0.0))
    engine.dispose()


# ---------------------------------------------------------------------------------------------------- whole lives


def test_a_document_is_read_found_and_deleted(store: Store, memory: Memory, tmp_path: Path) -> None:
    library = Library(store, tmp_path, memory=memory)
    other = ingest(library, f"{RENT} {'Geese are loud. ' * 300}".encode(), tenant="other").file_id
    record = ingest(library, f"{'Rain again. ' * 300}\n\n{RENT}\n\n{'Geese are loud. ' * 300}".encode())
    assert record.pages_parsed > 1
    hits = library.search("local", [record.file_id], "What is the rent?", 3)
    assert RENT in hits[0].text
    whole = library.text("local", record.file_id)
    assert whole[hits[0].start : hits[0].end] == hits[0].text
    assert library.search("local", [record.file_id], "unheard", 3) == []
    stores = VectorStores(store)
    made = stores.create("local", "n", None, None, {}, [NewStoreFile(record.file_id)])
    assert made.usage_bytes > 0
    library.delete_file("local", record.file_id)
    assert stores.get("local", made.store_id).counts.total == 0
    assert library.list_files("local") == []
    with store.read() as connection:
        assert entries.statistics(connection, "local", []).entries == 0
    assert library.get_file("other", other).file_id == other


def test_a_session_is_kept_found_rated_and_deleted(store: Store, memory: Memory) -> None:
    sessions, ratings = Sessions(store, memory), Ratings(store, memory.marks)
    said = [("user", "I live in Bonn. My locker has the number 4471.", 100.0), ("assistant", "Noted.\0", 101.5)]
    sessions.add("local", "trip", said, learn=True, answer=KeptAnswer("req_a1", "smol"))
    sessions.add("local", "other", [("user", "旅行的钥匙在陈伯那里。", 50.0)])
    assert [each.session_id for each in sessions.sessions("local", 9)] == ["trip", "other"]
    assert [turn.text[:6] for turn in sessions.turns("local", "trip", 0, 9)] == ["I live", "Noted."]
    found = sessions.search("local", None, "What is my locker's number?", 3).hits[0]
    assert isinstance(found, SessionTurn)
    assert (found.session_id, found.turn) == ("trip", 1)
    assert [fact.value for fact in sessions.profile("local", history=False)] == ["Bonn"]
    while memory.summaries.advance():
        pass
    rated = ratings.put("local", NewRating("chatcmpl-a1", "down", comment="No\0ne", span=Span("other", turn=1)))
    ((_, answer),) = ratings.export("local")
    assert (answer.expected, answer.model) == ("旅行的钥匙在陈伯那里。", "smol")
    assert sessions.search("local", None, said[0][1], 1).hits[0].text == answer.expected  # the mark
    exported = [each["type"] for each in sessions.export("local")]
    assert exported.count("turn") == 3
    sessions.delete("local", "trip")
    assert ratings.part("local", Chosen(answer_id=rated.answer_id), Part())[0] == []
    assert sessions.profile("local", history=False) == []
    assert sessions.forget_tenant("local") == ["other"]
    assert [each.action for each in audit.read(store, 9)][-2:] == ["session.delete", "tenant.forget"]


def test_kept_answers(store: Store) -> None:
    clock = iter(range(100, 200))
    kept = ResponseStore(store, lambda: float(next(clock)))
    body = {"id": "resp_1", "status": "completed", "previous_response_id": None, "output": [{"text": "ein Ö \0"}]}
    for each in (body, {**body, "id": "resp_2", "previous_response_id": "resp_1"}):
        kept.begin("local", [{"role": "user", "content": "a\0"}], {**each, "status": "in_progress"})
        assert kept.finish("local", Made(each))
    assert [each.body["id"] for each in kept.chain("local", "resp_2")] == ["resp_1", "resp_2"]
    assert kept.get("local", "resp_1").body == body
    kept.delete("local", "resp_1")
    assert kept.expire(1_000.0) == 1


def test_keys_and_usage(store: Store, tmp_path: Path) -> None:
    keyring, usage = Keyring(store, tmp_path), UsageStore(store)
    key, info = keyring.create("acme", deadline_s=2.5)
    assert keyring.authenticate(key).tenant == "acme"
    for _ in range(2):
        usage.add({(info.key_id, "2026-11-30"): Used(1, 1_000, 10, 0.5)})
    usage.add({(info.key_id, "2026-12-01"): Used(1, 3_000_000_000, 1)})
    assert usage.day(info.key_id, "2026-11-30") == Used(2, 2_000, 20, 1.0)
    assert usage.month(info.key_id, "2026-12").prompt_tokens == 3_000_000_000
    assert usage.since("2026-12-01") == {(info.key_id, "2026-12-01"): Used(1, 3_000_000_000, 1)}
    assert len(usage.since(None)) == 2


def test_a_wait_for_the_writer_is_short(store: Store) -> None:
    """Readers don't wait for a writer."""
    new_tenant(store)
    with store.write() as connection:
        connection.execute(TENANTS.update().values(created_at=5.0))
        began = time.monotonic()
        with store.read() as reading:
            assert reading.execute(sa.select(TENANTS.c.created_at)).scalar() == 0.0
        assert time.monotonic() - began < 5
