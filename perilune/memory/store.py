"""Opens the database and hands out transactions. Knows SQLAlchemy, two databases' habits, migrations; no table's
meaning.

SQLite (the default) runs in WAL mode with foreign keys on, waits for other writers, and syncs every commit, so
that what was accepted survives kill -9 and power loss. PostgreSQL keeps the same promises: a transaction that reads
sees one state, and those that write come one behind the other, whichever process they are of. Alembic is imported
only when the database isn't at the version this code needs.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from perilune.errors import ConfigError, Overloaded
from perilune.memory.schema import HEAD

BUSY_TIMEOUT_MS = 10_000
_SCRUB_TIMEOUT_MS = 500
_AGAIN_S = 0.01
_PG_DISK_FULL = "53100"
DATABASE_FILE = "perilune.db"
_LOCK_FILE = "database.lock"
_WRITE = "perilune_write"
_WRITE_LOCK = 7_234_017_283_807_667_300
"""Of PostgreSQL's advisory locks: any number that nobody else takes."""

_NUL, _REPLACEMENT = "\0", "\ufffd"
_PRIVATE = 0o600
_OTHERS = 0o077
_MIGRATIONS = Path(__file__).parent / "migrations"


class Store:
    """A migrated database. Thread-safe; `close` when done."""

    def __init__(self, home: Path, url: str = "") -> None:
        """Open (and create or upgrade) the database at `url`, or SQLite in `home`.

        Raises `ConfigError` for an unusable URL and for a database that a newer Perilune has written.
        """
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._turns: _Turns | None = None
        self._counting: sa.PoolProxiedConnection | None = None
        try:
            # An error that quoted its parameters would bring what people wrote into a log.
            # The connection used last comes first: each has a cache of pages, and idle ones would keep theirs.
            self._engine = sa.create_engine(
                _address(url) if url else f"sqlite:///{home / DATABASE_FILE}",
                hide_parameters=True,
                pool_use_lifo=True,
                pool_pre_ping=bool(url),  # a server may have been started anew
            )
        except (sa.exc.ArgumentError, ImportError) as error:
            raise ConfigError(
                f"The database URL can't be used: {error}.",
                hint="Leave `database` empty for SQLite, or give a postgresql:// URL.",
                param="database",
            ) from None
        self._snapshots = self._engine
        if self._engine.dialect.name == "sqlite":
            _keep_private(self._engine.url.database)
            _tune_sqlite(self._engine)
            self._turns = _Turns()
        elif self._engine.dialect.name == "postgresql":
            _tune_postgresql(self._engine)
            self._snapshots = self._engine.execution_options(isolation_level="REPEATABLE READ")
        try:
            if self.version() != HEAD:
                self._upgrade(home)
        except sa.exc.OperationalError as error:
            self.close()
            raise ConfigError(
                f"The database can't be opened: {error.orig}.", hint="Is it running?", param="database"
            ) from None
        except BaseException:
            self.close()
            raise

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """One consistent view of the database."""
        with self._snapshots.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """One transaction: committed at the end, undone on an exception. Takes the database's write lock at once.

        Writers queue for it; don't begin one inside another. Raises `Overloaded` where the disk is full or others
        hold the database for too long; nothing of the transaction is stored then."""
        with (
            self._turns.turn() if self._turns else nullcontext(),
            _faults_named(),
            self._engine.connect().execution_options(**{_WRITE: True}) as connection,
            connection.begin(),
        ):
            yield connection

    def scrub(self) -> bool:
        """Rid SQLite's files of what was deleted: deleted rows are overwritten with zeros (`secure_delete`), but
        the write-ahead log holds them until it is emptied. False where readers kept it: try again. A server's files
        are the server's."""
        if self._turns is None:
            return True
        with self._turns.turn(), self._engine.connect() as connection:
            raw = connection.connection.driver_connection
            assert raw is not None
            raw.execute(f"PRAGMA busy_timeout = {_SCRUB_TIMEOUT_MS}").close()  # other writers wait for this one
            busy, _, _ = raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            raw.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}").close()
        return not busy

    def change_counter(self) -> int | None:
        """A number that changes with every commit of whoever writes to the database; None where there is none.

        Takes microseconds and never waits, on SQLite (`PRAGMA data_version`); call it from one thread."""
        if self._engine.dialect.name != "sqlite":
            return None
        if self._counting is None:
            self._counting = self._engine.raw_connection()
        found = self._counting.cursor().execute("PRAGMA data_version").fetchone()
        return int(found[0])

    def version(self) -> str | None:
        """The migration the database is at; None for an empty one."""
        with self._engine.connect() as connection:
            if not self._engine.dialect.has_table(connection, "alembic_version"):
                return None
            found: str | None = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
            return found

    def close(self) -> None:
        if self._counting is not None:
            self._counting.close()
            self._counting = None
        self._engine.dispose()

    def _upgrade(self, home: Path) -> None:
        """Migrate under a lock between processes."""
        from alembic import command
        from alembic.util import CommandError

        with _lock(home / _LOCK_FILE):
            if self.version() == HEAD:  # another process was first
                return
            with self.write() as connection:
                settings = alembic_settings()
                settings.attributes["connection"] = connection
                try:
                    command.upgrade(settings, "head")
                except CommandError as error:
                    raise ConfigError(
                        f"The database was written by a newer Perilune ({error}).",
                        hint="Update Perilune, or set `home` to another folder.",
                    ) from None
        if self.version() != HEAD:
            raise ConfigError(f"The database could not be upgraded to version {HEAD}.", hint="Restore a backup.")


def alembic_settings() -> Any:
    """Alembic's configuration; its environment takes the connection from `attributes`."""
    from alembic.config import Config

    settings = Config()
    settings.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    return settings


def _keep_private(database: str | None) -> None:
    """Documents' text is in there: only the owner may read it, whatever the folder's mode and the umask are.

    SQLite gives its journals the mode of the database, so the file must have it before SQLite opens it.
    """
    if not database or database == ":memory:" or database.startswith("file:"):
        return
    os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE))
    for suffix in ("", "-wal", "-shm"):
        path = Path(database + suffix)
        # Another user's file can't be changed; that user then decides who reads it.
        if path.exists() and path.stat().st_mode & _OTHERS and path.stat().st_uid == os.geteuid():
            path.chmod(_PRIVATE)


class _Turns:
    """A lock that is given in the order in which it was asked for.

    SQLite's own writers poll, so one in a crowd may starve past the busy timeout, and what it had to store is lost.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._queue: deque[threading.Lock] = deque()  # the first one's turn it is

    @contextmanager
    def turn(self) -> Iterator[None]:
        mine = threading.Lock()
        with self._guard:
            self._queue.append(mine)
            mine.acquire()
            if self._queue[0] is mine:
                mine.release()
        try:
            with mine:
                yield
        finally:
            with self._guard:
                was_first = self._queue[0] is mine
                self._queue.remove(mine)
                if was_first and self._queue:
                    self._queue[0].release()


def _tune_sqlite(engine: sa.Engine) -> None:
    @sa.event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver's guesses
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}").close()
        _use_wal(connection)
        for pragma in ("synchronous = FULL", "foreign_keys = ON", "secure_delete = ON"):
            connection.execute(f"PRAGMA {pragma}").close()

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # A deferred transaction that reads first can't become a writer once another one has committed.
        write = connection.get_execution_options().get(_WRITE, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


@contextmanager
def _faults_named() -> Iterator[None]:
    """A fault of the machine as an error that says what to do."""
    try:
        yield
    except sa.exc.OperationalError as error:
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        state = getattr(error.orig, "sqlstate", None)
        if code == sqlite3.SQLITE_FULL or state == _PG_DISK_FULL:
            raise Overloaded(
                "The disk is full; nothing was stored.", hint="Delete files or free disk space, then try again."
            ) from error
        if code == sqlite3.SQLITE_BUSY:
            raise Overloaded("Another program holds the database.", hint="Try again in a few seconds.") from error
        raise


def _use_wal(connection: sqlite3.Connection) -> None:
    """Keep the database in WAL mode. Where others have a new file open, SQLite refuses at once whatever the busy
    timeout is, so it is asked until then. Raises `sqlite3.OperationalError`."""
    end = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").close()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
        time.sleep(_AGAIN_S)


def _address(url: str) -> sa.URL:
    """With our driver, where the URL names none. Raises as `sa.make_url`."""
    parsed = sa.make_url(url)
    if parsed.drivername in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    return parsed


def _tune_postgresql(engine: sa.Engine) -> None:
    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # Writers read before they write and upsert many rows: side by side they would lose updates, or deadlock.
        if connection.get_execution_options().get(_WRITE, False):
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITE_LOCK})")

    @sa.event.listens_for(engine, "before_cursor_execute", retval=True)
    def without_nul(
        _connection: sa.Connection, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool
    ) -> tuple[str, Any]:
        """PostgreSQL keeps no NUL in a text; a sign in its place leaves every other character where it is."""
        return statement, _storable(parameters)


def _storable(parameters: Any) -> Any:
    if isinstance(parameters, str):
        return parameters.replace(_NUL, _REPLACEMENT) if _NUL in parameters else parameters
    if isinstance(parameters, dict):
        return {name: _storable(value) for name, value in parameters.items()}
    if isinstance(parameters, list | tuple):
        return type(parameters)(_storable(value) for value in parameters)
    return parameters


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
