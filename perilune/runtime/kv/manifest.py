"""The table of contents of a KV folder, in SQLite: which block is where in which file, and whose it is.

Knows rows and transactions. Knows nothing of the files' bytes or of quotas. Not thread-safe: `disk.DiskKVStore`
calls it under its write lock. A row is written after its file is durable, and a transaction that returned survives
a power cut (WAL, synchronous=FULL).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perilune.runtime.kv.spec import BlockHash

SCHEMA_VERSION = 1
_BATCH = 500  # bound parameters per statement; SQLite's oldest limit is 999
_SCHEMA = """
CREATE TABLE files (
    file_id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, size_bytes INTEGER NOT NULL);
CREATE TABLE blocks (
    hash BLOB PRIMARY KEY, file_id INTEGER NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL,
    checksum BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE owners (owner TEXT NOT NULL, hash BLOB NOT NULL, PRIMARY KEY (owner, hash)) WITHOUT ROWID;
CREATE TABLE used (owner TEXT PRIMARY KEY, last_used_at REAL NOT NULL) WITHOUT ROWID;
"""


class ManifestDamaged(Exception):
    """The file is no manifest of this version: its contents are lost. Nothing else says so."""


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a block's bytes are: `length` bytes at `start` of file `file_id`; `checksum` is their xxh3-128."""

    file_id: int
    start: int
    length: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A file of blocks."""

    file_id: int
    name: str
    size_bytes: int


class Manifest:
    """Raises `ManifestDamaged` from the constructor for a damaged file: start a new one then. Any other
    `sqlite3.Error` (locked, disk full, no permission) says nothing about what is in it."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=1.0)
        try:
            with damage_named():
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == SCHEMA_VERSION:
            (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise ManifestDamaged(str(verdict))
        elif version == 0:
            self._db.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version={SCHEMA_VERSION};COMMIT;")
        else:
            raise ManifestDamaged(f"manifest version {version} isn't {SCHEMA_VERSION}")

    # ---------------------------------------------------------------------------------------- reading

    def files(self) -> list[SegmentFile]:
        rows = self._db.execute("SELECT file_id, name, size_bytes FROM files ORDER BY file_id")
        return [SegmentFile(*row) for row in rows]

    def blocks(self) -> Iterator[tuple[BlockHash, BlockPlace]]:
        for name, *place in self._db.execute("SELECT hash, file_id, start, length, checksum FROM blocks"):
            yield name, BlockPlace(*place)

    def owners(self) -> Iterator[tuple[str, BlockHash]]:
        yield from self._db.execute("SELECT owner, hash FROM owners")

    def last_used(self) -> dict[str, float]:
        return dict(self._db.execute("SELECT owner, last_used_at FROM used"))

    # ---------------------------------------------------------------------------------------- writing

    def add(
        self,
        file: SegmentFile,
        blocks: Mapping[BlockHash, BlockPlace],
        owners: Iterable[tuple[str, BlockHash]],
    ) -> None:
        """Enter a durable file with its blocks. A block that had a row moves to the new file."""
        rows = [(name, p.file_id, p.start, p.length, p.checksum) for name, p in blocks.items()]
        with _Transaction(self._db):
            self._db.execute("INSERT INTO files VALUES (?, ?, ?)", (file.file_id, file.name, file.size_bytes))
            self._db.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?)", rows)
            self._db.executemany("INSERT OR IGNORE INTO owners VALUES (?, ?)", owners)

    def own(self, owners: Iterable[tuple[str, BlockHash]]) -> None:
        with _Transaction(self._db):
            self._db.executemany("INSERT OR IGNORE INTO owners VALUES (?, ?)", owners)

    def drop(self, blocks: Sequence[BlockHash], files: Sequence[int]) -> None:
        """Remove blocks with all their owners, and files."""
        with _Transaction(self._db):
            for start in range(0, len(blocks), _BATCH):
                batch = blocks[start : start + _BATCH]
                marks = ",".join("?" * len(batch))
                self._db.execute(f"DELETE FROM blocks WHERE hash IN ({marks})", batch)  # noqa: S608 - marks only
                self._db.execute(f"DELETE FROM owners WHERE hash IN ({marks})", batch)  # noqa: S608 - marks only
            self._db.executemany("DELETE FROM files WHERE file_id = ?", [(file,) for file in files])

    def disown(self, owner: str) -> None:
        with _Transaction(self._db):
            self._db.execute("DELETE FROM owners WHERE owner = ?", (owner,))
            self._db.execute("DELETE FROM used WHERE owner = ?", (owner,))

    def touch(self, last_used: Mapping[str, float]) -> None:
        """Store when owners were last used (seconds since the epoch)."""
        with _Transaction(self._db):
            self._db.executemany("INSERT OR REPLACE INTO used VALUES (?, ?)", list(last_used.items()))

    def close(self) -> None:
        self._db.close()


@contextmanager
def damage_named() -> Iterator[None]:
    """Turn SQLite's words for a damaged file into `ManifestDamaged`; its other errors pass."""
    try:
        yield
    except sqlite3.Error as error:
        # Python's own errors (text that is no UTF-8) have no code. SQLITE_ERROR: a table isn't there.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
            raise ManifestDamaged(str(error)) from error
        raise


class _Transaction:
    """BEGIN … COMMIT, or ROLLBACK when the body raises."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:  # the body failed, or the commit did (disk full)
                self._db.execute("ROLLBACK")
