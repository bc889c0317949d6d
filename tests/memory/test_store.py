"""The database: migrations fit the tables, versions are checked, transactions hold, processes don't collide."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from perilune.errors import ConfigError, Overloaded
from perilune.memory.memory import Memory
from perilune.memory.schema import HEAD, METADATA, TENANTS
from perilune.memory.sessions import Sessions
from perilune.memory.store import DATABASE_FILE, Store, alembic_settings
from perilune.memory.vectors.lance import LanceIndex


def test_head_is_the_last_migration() -> None:
    assert ScriptDirectory.from_config(alembic_settings()).get_current_head() == HEAD


def test_migrations_make_the_tables(store: Store) -> None:
    with store.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    assert store.version() == HEAD


def test_sqlite_is_tuned(store: Store) -> None:
    with store.read() as connection:
        values = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys", "synchronous", "busy_timeout")
        }
    assert values == {"journal_mode": "wal", "foreign_keys": 1, "synchronous": 2, "busy_timeout": 10_000}


def test_alembic_is_not_imported_for_a_current_database(tmp_path: Path) -> None:
    Store(tmp_path).close()
    code = (
        "import sys; from pathlib import Path; from perilune.memory.store import Store\n"
        f"Store(Path({str(tmp_path)!r})).close()\nassert 'alembic' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_full_disk_is_named_and_nothing_is_lost(store: Store, tmp_path: Path) -> None:
    """SQLite's own error, as from a disk without room: a transaction that doesn't fit leaves nothing of it."""
    sessions = Sessions(store, Memory(store, LanceIndex(tmp_path / "index", "none", 1), None, indexer=None))
    sessions.add("local", "trip", [("user", "Kept.", 1.0)])
    with store.read() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()

    @sa.event.listens_for(store._engine, "connect")
    def no_more_room(connection: Any, _record: Any) -> None:
        connection.execute(f"PRAGMA max_page_count = {room['pages']}").close()

    room = {"pages": pages}
    store._engine.dispose()
    with pytest.raises(Overloaded, match="disk is full") as caught:
        sessions.add("local", "trip", [("user", "Too much. " * 100_000, 2.0)])
    assert caught.value.hint
    assert [turn.text for turn in sessions.turns("local", "trip", 0, 9)] == ["Kept."]
    room["pages"] = 1 << 30
    store._engine.dispose()
    sessions.add("local", "trip", [("user", "There is room again.", 3.0)])
    assert [turn.turn for turn in sessions.turns("local", "trip", 0, 9)] == [1, 2]


def test_another_program_that_holds_the_database_is_named(store: Store, tmp_path: Path) -> None:
    @sa.event.listens_for(store._engine, "connect")
    def impatient(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA busy_timeout = 50").close()

    store._engine.dispose()
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE_FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Overloaded, match="holds the database"), store.write():
            pass
    with store.write():
        pass


def test_newer_database_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    store.close()
    with pytest.raises(ConfigError, match="newer Perilune"):
        Store(tmp_path)


def test_bad_url_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="database URL"):
        Store(tmp_path, "no-such-database://x")


def test_processes_that_start_together_share_one_database(tmp_path: Path) -> None:
    code = (
        f"from pathlib import Path; from perilune.memory.store import Store; Store(Path({str(tmp_path)!r})).close()"
    )
    started = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(4)]
    for process in started:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    assert (tmp_path / DATABASE_FILE).exists()


def test_exception_undoes_everything(store: Store) -> None:
    def fail() -> None:
        with store.write() as connection:
            connection.execute(TENANTS.insert().values(id="a", secret=b"x" * 32, created_at=0.0))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with store.read() as connection:
        assert connection.execute(sa.select(TENANTS)).first() is None


def test_writers_that_read_first_wait_for_each_other(store: Store) -> None:
    with store.write() as connection:
        connection.execute(TENANTS.insert().values(id="a", secret=b"x" * 32, created_at=0.0))
    errors: list[Exception] = []

    def count_up() -> None:
        try:
            for _ in range(20):
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
    assert not errors
    with store.read() as connection:
        assert connection.execute(sa.select(TENANTS.c.created_at)).scalar_one() == 80


def test_only_the_owner_reads_the_database(tmp_path: Path) -> None:
    """In a home that everybody may enter, made with a mild umask, or by an earlier version."""
    tmp_path.chmod(0o755)
    old = os.umask(0o022)
    try:
        for _ in range(2):
            store = Store(tmp_path)
            with store.write() as connection:
                connection.execute(
                    TENANTS.insert().values(id=os.urandom(4).hex(), secret=b"x" * 32, created_at=0.0)
                )
            files = [path for path in tmp_path.iterdir() if path.is_file()]
            assert len(files) >= 3, files  # the journal, too
            assert {path.stat().st_mode & 0o077 for path in files} == {0}, files
            store.close()
            (tmp_path / DATABASE_FILE).chmod(0o644)
    finally:
        os.umask(old)


def test_writers_take_turns_in_the_order_they_came(store: Store) -> None:
    """One that writes again and again must not starve the others past the busy timeout."""
    order: list[str] = []
    waits = threading.Event()

    def write(name: str) -> None:
        with store.write():
            order.append(name)

    def write_twice() -> None:
        with store.write():
            order.append("greedy")
            waits.wait(10)
            time.sleep(0.2)  # the others stand in the queue by now
        write("greedy again")

    greedy = threading.Thread(target=write_twice)
    greedy.start()
    while not order:
        time.sleep(0.001)
    others = [threading.Thread(target=write, args=(f"other {number}",)) for number in range(3)]
    for other in others:
        other.start()
        time.sleep(0.02)
    waits.set()
    for thread in (greedy, *others):
        thread.join(10)
    assert order == ["greedy", "other 0", "other 1", "other 2", "greedy again"]


def test_a_failed_write_passes_the_turn_on(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.write():
        raise ZeroDivisionError
    with store.write() as connection:
        assert connection.execute(sa.select(TENANTS)).all() == []
