"""The embedded index: two LanceDB tables in a folder, one for words and one for vectors.

Knows LanceDB and nothing of entries. Two tables, because words are there at once and vectors come later: each then
only ever grows by appending, which keeps fresh rows findable and the word index untouched when vectors arrive.
Several processes may use one folder. LanceDB starts threads of its own, so building and tidying (`maintain`) is run
by `upkeep`, in a process of low priority. lancedb is imported where the folder is opened.

Our terms go in as words of 16 hex digits, split at white space: no analyser of LanceDB's takes part.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from perilune.memory.scope import Scope
from perilune.memory.vectors.protocol import IndexUnavailable, Row, Size, Terms, Vector

TEXTS = "texts"
ANN_ROWS = 10_000
"""From here on vectors are searched through HNSW; below, reading all of them is faster than building it."""

RETRAIN_SHARE = 0.5
"""HNSW is built anew when rows outside it exceed this share."""

KEEP_VERSIONS = timedelta(minutes=10)
"""Readers of another process may still be on a version this old."""

PURGE_PAUSE = timedelta(seconds=4)
"""Before a purge drops older versions: searches that read one end meanwhile."""

INDEX_CACHE_BYTES = 512 << 20
"""What open indices may take. Vectors of 384 numbers take 0.6 KB each while they are searched: 100,000 take 60 MB.
Beyond this they are read from disk again. (LanceDB's own bound is 6 GB, and every write adds to it.)"""

METADATA_CACHE_BYTES = 16 << 20

_BATCH = 10_000
_CLEAR_ATTEMPTS, _CLEAR_PAUSE_S = 5, 0.1
_log = logging.getLogger(__name__)
T = TypeVar("T")


class LanceIndex:
    """Implements `VectorIndex` in `folder` for vectors of `model`, which have `width` numbers."""

    def __init__(self, folder: Path, model: str, width: int) -> None:
        self._folder = folder
        self._width = width
        self._vectors = f"vectors_{hashlib.blake2b(model.encode(), digest_size=6).hexdigest()}_{width}"
        self._database: Any = None
        self._session: Any = None
        self._tables: dict[str, Any] = {}
        self._lock = threading.Lock()

    # ---------------------------------------------------------------------------------------------- writing

    def put_texts(self, rows: Sequence[Row], terms: Sequence[Mapping[int, int]]) -> None:
        words = [" ".join(_word(term) for term, count in held.items() for _ in range(count)) for held in terms]
        self._put(TEXTS, rows, {"tokens": words})

    def put_vectors(self, rows: Sequence[Row], vectors: Vector) -> None:
        import pyarrow as pa

        flat = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
        self._put(self._vectors, rows, {"vector": pa.FixedSizeListArray.from_arrays(flat, self._width)})

    def _put(self, name: str, rows: Sequence[Row], more: Mapping[str, Any]) -> None:
        if not rows:
            return
        import pyarrow as pa

        with self._table(name) as table:
            data = pa.table(_columns(rows) | dict(more), schema=_schema(name, self._width))
            # What was written before a crash is offered again: a row that is there stays as it is.
            table.merge_insert("id").when_not_matched_insert_all().execute(data)

    def remove(self, ids: Sequence[int]) -> None:
        for name in (TEXTS, self._vectors):
            with self._table(name) as table:
                for at in range(0, len(ids), _BATCH):
                    table.delete(_in("id", map(str, ids[at : at + _BATCH])))

    def clear(self) -> None:
        with self._lock:
            self._tables.clear()
            self._database = self._session = None  # with what it remembers of the files
            for attempt in range(_CLEAR_ATTEMPTS):
                try:
                    shutil.rmtree(self._folder)
                except FileNotFoundError:
                    if not self._folder.exists():
                        return
                except OSError as error:  # a process that tidies it may still write into it
                    if attempt == _CLEAR_ATTEMPTS - 1:
                        raise IndexUnavailable(
                            f"The search index can't be deleted: {error.strerror}.",
                            hint="Check who owns the folder `index` in the home folder.",
                        ) from error
                else:
                    return
                time.sleep(_CLEAR_PAUSE_S)

    # -------------------------------------------------------------------------------------------- searching

    def words(self, terms: Terms, limit: int, scope: Scope) -> list[int]:
        if not terms.weights:
            return []
        with self._table(TEXTS) as table:
            # Not before the table: two threads that import lancedb's modules in another order get half of them.
            from lancedb.query import MatchQuery

            query = MatchQuery(" ".join(map(_word, terms.weights)), "tokens")
            found = table.search(query, query_type="fts").select(["id", "_score"])
            rows = found.where(filter_text(scope), prefilter=True).limit(limit).to_arrow()
        return [int(each) for each in rows["id"].to_pylist()]

    def nearest(self, vector: Vector, limit: int, scope: Scope) -> list[int]:
        with self._table(self._vectors) as table:
            found = table.search(vector, vector_column_name="vector", query_type="vector").distance_type("cosine")
            found = found.ef(max(2 * limit, 150)).select(["id", "_distance"])
            rows = found.where(filter_text(scope), prefilter=True).limit(limit).to_arrow()
        return [int(each) for each in rows["id"].to_pylist()]

    def size(self) -> Size:
        counts = []
        for name in (TEXTS, self._vectors):
            with self._table(name) as table:
                counts.append(int(table.count_rows()))
        return Size(*counts)

    @property
    def cached_bytes(self) -> int:
        """What LanceDB keeps of its files in memory now."""
        return int(self._session.size_bytes) if self._session is not None else 0

    # ------------------------------------------------------------------------------------------ maintenance

    def maintain(self, purge: bool = False) -> None:
        for name in (TEXTS, self._vectors):
            with self._table(name) as table:
                if purge:
                    self._rewrite(table, name)
                if name == self._vectors and self._needs_ann(table, purge):
                    _build_ann(table)
                table.optimize(cleanup_older_than=KEEP_VERSIONS)
        if purge:
            self._drop_versions()

    @staticmethod
    def _rewrite(table: Any, name: str) -> None:
        """Make the newest version one of live rows only. LanceDB rewrites a fragment where it joins it with another
        that is indexed as it is, and an index keeps names of rows that are gone: one row is put again, to have
        something to join, and the indices are built anew."""
        some = table.search().limit(1).to_arrow()
        if some.num_rows:
            table.merge_insert("id").when_matched_update_all().execute(some)
        _add_indices(table, name)

    def _drop_versions(self) -> None:
        """Older versions, and tables for vectors of other models, which SQL has, too."""
        import lancedb

        database = lancedb.connect(self._folder)
        for name in set(database.list_tables().tables) - {TEXTS, self._vectors}:
            database.drop_table(name)
        time.sleep(PURGE_PAUSE.total_seconds())
        for name in (TEXTS, self._vectors):
            with self._table(name) as table:
                table.optimize(cleanup_older_than=PURGE_PAUSE / 2)

    @staticmethod
    def _needs_ann(table: Any, purge: bool) -> bool:
        rows, known = table.count_rows(), table.index_stats("vector_idx")
        if rows < ANN_ROWS:
            return purge and known is not None
        return known is None or purge or known.num_unindexed_rows > RETRAIN_SHARE * rows

    def close(self) -> None:
        with self._lock:
            self._tables.clear()

    # -------------------------------------------------------------------------------------------- the tables

    @contextmanager
    def _table(self, name: str) -> Iterator[Any]:
        """The open table; what fails inside counts as the index's failure."""
        try:
            yield self._open(name)
        except (RuntimeError, ValueError, OSError) as error:  # all that lancedb raises
            with self._lock:
                self._tables.pop(name, None)
            raise IndexUnavailable(
                f"The search index can't be used: {_first_line(error)}.",
                hint="It is rebuilt from the database in the background.",
            ) from error

    def _open(self, name: str) -> Any:
        with self._lock:
            table = self._tables.get(name)
            if table is None:
                table = self._tables[name] = self._create(name)
            return table

    def _connect(self) -> Any:
        """The folder's database; both tables share its bounded caches."""
        if self._database is None:
            import lancedb
            import pyarrow as pa

            # Arrow's own allocator keeps megabytes for each thread that ever touched a table.
            pa.set_memory_pool(pa.system_memory_pool())
            self._session = lancedb.Session(INDEX_CACHE_BYTES, METADATA_CACHE_BYTES)
            # 0: another process's writes are seen by the next search.
            self._database = lancedb.connect(
                self._folder, read_consistency_interval=timedelta(0), session=self._session
            )
        return self._database

    def _create(self, name: str) -> Any:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        database = self._connect()
        schema = _schema(name, self._width)
        table = _either(lambda: database.open_table(name), lambda: database.create_table(name, schema=schema))
        if table.schema.names != schema.names:
            raise OSError(f"table {name} has other columns")
        if "id_idx" not in {index.name for index in table.list_indices()}:
            _add_indices(table, name)
        return table


def _either(first: Callable[[], T], second: Callable[[], T]) -> T:
    """Open, else create, else open: another process may have been faster."""
    for attempt in (first, second):
        try:
            return attempt()
        except (ValueError, RuntimeError) as error:
            _log.debug("%s", error)
    return first()


def _add_indices(table: Any, name: str) -> None:
    from lancedb.index import FTS, Bitmap, BTree, LabelList

    scalar = {
        **dict.fromkeys(("id", "number", "page", "at"), BTree()),
        **dict.fromkeys(("tenant", "source_id", "speaker"), Bitmap()),
        "entities": LabelList(),
    }
    for column, config in scalar.items():
        table.create_index(column, config=config)
    if name == TEXTS:
        plain = FTS(
            base_tokenizer="whitespace",
            max_token_length=None,
            lower_case=False,
            stem=False,
            remove_stop_words=False,
            ascii_folding=False,
        )
        table.create_index("tokens", config=plain)


def _build_ann(table: Any) -> None:
    from lancedb.index import HnswSq

    table.create_index("vector", config=HnswSq(distance_type="cosine", num_partitions=1), replace=True)


def _schema(name: str, width: int) -> Any:
    import pyarrow as pa

    own = pa.field("tokens", pa.string()) if name == TEXTS else pa.field("vector", pa.list_(pa.float32(), width))
    return pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("tenant", pa.string()),
            pa.field("source_id", pa.string()),
            pa.field("number", pa.int64()),
            pa.field("page", pa.int64()),
            pa.field("at", pa.float64()),
            pa.field("speaker", pa.string()),
            pa.field("entities", pa.list_(pa.string())),
            own,
        ]
    )


def _columns(rows: Sequence[Row]) -> dict[str, list[object]]:
    names = ("id", "tenant", "source_id", "number", "page", "at", "speaker")
    columns: dict[str, list[object]] = {name: [getattr(row, name) for row in rows] for name in names}
    return columns | {"entities": [list(row.entities) for row in rows]}


def _word(term: int) -> str:
    return f"{term:016x}"


def filter_text(scope: Scope) -> str:
    """The scope as LanceDB's SQL. Strings are quoted, so that no name can end its literal."""
    parts = [f"tenant = {_quote(scope.tenant)}"]
    if scope.sources is not None:
        parts.append(_in("source_id", map(_quote, scope.sources)))
    if scope.speakers:
        parts.append(_in("speaker", map(_quote, scope.speakers)))
    if scope.entities:
        parts.append(f"array_has_any(entities, [{', '.join(map(_quote, scope.entities))}])")
    if scope.since_s is not None:
        parts.append(f"at >= {float(scope.since_s)!r}")
    if scope.until_s is not None:
        parts.append(f"at <= {float(scope.until_s)!r}")
    for name, limits in (("number", scope.numbers), ("page", scope.pages)):
        if limits is not None:
            parts.append(f"{name} >= {int(limits[0])} AND {name} <= {int(limits[1])}")
    return " AND ".join(parts)


def _in(column: str, literals: Iterator[str] | map[str]) -> str:
    listed = ", ".join(literals)
    return f"{column} IN ({listed})" if listed else "false"


def _quote(text: str) -> str:
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
