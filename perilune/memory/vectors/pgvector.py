"""The index on a server: two PostgreSQL tables, tsvector for words and pgvector for vectors.

Knows PostgreSQL and nothing of entries. Our terms are the lexemes of a tsvector, each at as many positions as it
occurs, so that no text-search configuration of the server takes part. PostgreSQL has no BM25, but `ts_rank` of one
lexeme is S(n) = (1 + 1/4 + … + 1/n²) · 6/π², from which n is had back (n ≈ 1 / (π²/6 · (1 - S)) - 1/2, right to 2
%); BM25 is then plain SQL, with the weights that we pass.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, TSQUERY, TSVECTOR, insert
from sqlalchemy.types import UserDefinedType

from perilune.errors import ConfigError
from perilune.memory.scope import Scope, conditions
from perilune.memory.scoring import K1, B
from perilune.memory.vectors.protocol import IndexUnavailable, Row, Size, Terms, Vector

_RANK_ALL = "'{1,1,1,1}'::float4[]"
_ZETA_2 = math.pi**2 / 6
_EF_SEARCH = 200
_MAX_POSITIONS = 255  # of one lexeme, in a tsvector
_BATCH = 1_000
_CREATE_LOCK = 0x7065_7269


class _Embedding(UserDefinedType[Any]):
    """pgvector's column type; values travel as text."""

    cache_ok = True

    def __init__(self, width: int) -> None:
        self.width = width

    def get_col_spec(self, **_: object) -> str:
        return f"vector({self.width})"


class PgVectorIndex:
    """Implements `VectorIndex` in the database at `url`, for vectors of `model`, which have `width` numbers.

    Raises `ConfigError` for an unusable URL. Needs the extension `vector` 0.8 or the right to create it.
    """

    def __init__(self, url: str, model: str, width: int) -> None:
        try:
            parsed = sa.make_url(url)
            if parsed.get_backend_name() != "postgresql":
                raise ValueError(f"{parsed.drivername} is not PostgreSQL")
            import psycopg  # here: only who uses a server pays for it

            driver = parsed.set(drivername="postgresql+psycopg")
            self._engine = sa.create_engine(driver, module=psycopg, pool_pre_ping=True)
        except (sa.exc.ArgumentError, ImportError, ValueError) as error:
            raise ConfigError(
                f"The index URL can't be used: {error}.",
                hint="Give a postgresql:// URL, or leave memory.index empty for the embedded index.",
                param="memory.index",
            ) from None
        metadata = sa.MetaData()
        self._texts = _table(
            "perilune_texts", metadata, sa.Column("tokens", TSVECTOR), sa.Column("length", sa.Integer)
        )
        label = hashlib.blake2b(model.encode(), digest_size=6).hexdigest()
        name = f"perilune_vectors_{label}_{width}"
        self._vectors = _table(name, metadata, sa.Column("vector", _Embedding(width)))
        sa.Index("ix_perilune_texts_tokens", self._texts.c.tokens, postgresql_using="gin")
        self._ready = False

    # ---------------------------------------------------------------------------------------------- writing

    def put_texts(self, rows: Sequence[Row], terms: Sequence[Mapping[int, int]]) -> None:
        values = [
            {**_values(row), "tokens": _tsvector(held), "length": sum(held.values())}
            for row, held in zip(rows, terms, strict=True)
        ]
        tokens = sa.cast(sa.bindparam("tokens", type_=sa.Text), TSVECTOR)
        self._put(self._texts, values, {"tokens": tokens})

    def put_vectors(self, rows: Sequence[Row], vectors: Vector) -> None:
        values = [{**_values(row), "vector": _text(v)} for row, v in zip(rows, vectors, strict=True)]
        vector = sa.cast(sa.bindparam("vector", type_=sa.Text), self._vectors.c.vector.type)
        self._put(self._vectors, values, {"vector": vector})

    def _put(self, table: sa.Table, values: list[dict[str, Any]], typed: Mapping[str, Any]) -> None:
        if values:
            names = [key for key in values[0] if key not in typed]
            bound = {name: sa.bindparam(name, type_=table.c[name].type) for name in names}
            statement = insert(table).values({**bound, **typed}).on_conflict_do_nothing()
            with self._connect() as connection:
                connection.execute(statement, values)

    def remove(self, ids: Sequence[int]) -> None:
        with self._connect() as connection:
            for table in (self._texts, self._vectors):
                for at in range(0, len(ids), _BATCH):
                    connection.execute(table.delete().where(table.c.id.in_(ids[at : at + _BATCH])))

    def clear(self) -> None:
        with self._connect() as connection:
            for table in (self._texts, self._vectors):
                connection.execute(sa.text(f"TRUNCATE {table.name}"))

    # -------------------------------------------------------------------------------------------- searching

    def words(self, terms: Terms, limit: int, scope: Scope) -> list[int]:
        if not terms.weights:
            return []
        table = self._texts
        score = " + ".join(f"({_bm25(term, weight, terms.mean_length)})" for term, weight in terms.weights.items())
        any_of = sa.cast(sa.literal(" | ".join(map(_word, terms.weights)), sa.Text), TSQUERY)
        query = (
            sa.select(table.c.id)
            .where(table.c.tokens.op("@@")(any_of), *conditions(scope, table), *_entities(scope, table))
            .order_by(sa.literal_column(score).desc(), table.c.id)
            .limit(limit)
        )
        with self._connect() as connection:
            return list(connection.execute(query).scalars())

    def nearest(self, vector: Vector, limit: int, scope: Scope) -> list[int]:
        table = self._vectors
        wanted = sa.cast(sa.literal(_text(vector), sa.Text), table.c.vector.type)
        query = (
            sa.select(table.c.id)
            .where(*conditions(scope, table), *_entities(scope, table))
            .order_by(table.c.vector.op("<=>")(wanted))
            .limit(limit)
        )
        with self._connect() as connection:
            connection.execute(sa.text(f"SET LOCAL hnsw.ef_search = {max(_EF_SEARCH, limit)}"))
            # A filter that drops most of what HNSW offers must make it look on, not come back short.
            connection.execute(sa.text("SET LOCAL hnsw.iterative_scan = relaxed_order"))
            return list(connection.execute(query).scalars())

    def size(self) -> Size:
        with self._connect() as connection:
            counts = [
                connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
                for table in (self._texts, self._vectors)
            ]
        return Size(*counts)

    # ------------------------------------------------------------------------------------------ maintenance

    def maintain(self, purge: bool = False) -> None:
        """Build HNSW once there is something to build it from; PostgreSQL keeps it, and vacuums by itself. With
        `purge` it does so now; what is removed is overwritten when the server takes the room again."""
        name = self._vectors.name
        with self._connect() as connection:
            connection.execute(
                sa.text(f"CREATE INDEX IF NOT EXISTS {name}_ann ON {name} USING hnsw (vector vector_cosine_ops)")
            )
            connection.execute(sa.text(f"ANALYZE {name}"))
            connection.execute(sa.text(f"ANALYZE {self._texts.name}"))
        if purge:
            with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(sa.text(f"VACUUM {name}, {self._texts.name}"))

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _connect(self) -> Iterator[sa.Connection]:
        """One transaction; makes the tables on first use."""
        try:
            with self._engine.begin() as connection:
                if not self._ready:
                    # Two that create at once would collide, "if not exists" or not.
                    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATE_LOCK)))
                    connection.execute(sa.text("CREATE EXTENSION IF NOT EXISTS vector"))
                    self._texts.metadata.create_all(connection)
                    self._ready = True
                yield connection
        except sa.exc.SQLAlchemyError as error:
            self._ready = False
            cause = getattr(error, "orig", None) or error
            raise IndexUnavailable(
                f"The search index in PostgreSQL can't be used: {str(cause).splitlines()[0][:200]}.",
                hint="Check that the server runs, and memory.index.",
            ) from error


def _table(name: str, metadata: sa.MetaData, *own: sa.Column[Any]) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("source_id", sa.String(64), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("page", sa.Integer),
        sa.Column("at", sa.Float),
        sa.Column("speaker", sa.String(128)),
        sa.Column("entities", ARRAY(sa.Text), nullable=False),
        *own,
        sa.Index(f"ix_{name}_source", "tenant", "source_id", "number"),
        sa.Index(f"ix_{name}_at", "tenant", "at"),
        sa.Index(f"ix_{name}_entities", "entities", postgresql_using="gin"),
    )


def _values(row: Row) -> dict[str, Any]:
    names = ("id", "tenant", "source_id", "number", "page", "at", "speaker")
    return {name: getattr(row, name) for name in names} | {"entities": list(row.entities)}


def _entities(scope: Scope, table: sa.Table) -> list[sa.ColumnElement[bool]]:
    if not scope.entities:
        return []
    return [table.c.entities.op("&&")(sa.cast(list(scope.entities), ARRAY(sa.Text)))]


def _bm25(term: int, weight: float, mean_length: float) -> str:
    """SQL of one term's score; the frequency is had back from `ts_rank`, which is 0 where the term is missing."""
    rank = f"ts_rank({_RANK_ALL}, tokens, '{_word(term)}'::tsquery)"  # hex digits only: nothing to escape
    often = f"(1 / ({_ZETA_2!r} * greatest(1 - {rank}, 0.003)) - 0.5)"
    norm = f"({K1 * (1 - B)!r} + {K1 * B / max(1.0, mean_length)!r} * length)"
    return f"CASE WHEN {rank} > 0 THEN {weight * (K1 + 1)!r} * {often} / ({often} + {norm}) ELSE 0 END"


def _tsvector(terms: Mapping[int, int]) -> str:
    return " ".join(
        f"{_word(term)}:{','.join(str(at + 1) for at in range(min(count, _MAX_POSITIONS)))}"
        for term, count in terms.items()
    )


def _word(term: int) -> str:
    return f"{term:016x}"


def _text(vector: Vector) -> str:
    return "[" + ",".join(f"{value:.6g}" for value in np.asarray(vector, np.float32).tolist()) + "]"
