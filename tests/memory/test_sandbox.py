"""Parsers that hang, crash, eat memory, lie or are orphaned: each ends at once, in a sentence, harming nobody."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perilune.config import DocumentSettings
from perilune.core import FileStatus
from perilune.errors import UnsupportedDocument
from perilune.memory.chunk import Span
from perilune.memory.ingest import sandbox
from perilune.memory.ingest.pagination import PageText
from perilune.memory.ingest.protocol import (
    LENGTHS,
    Batch,
    Done,
    Frame,
    Job,
    Opened,
    ProtocolError,
    Unchanged,
    decode,
    encode,
    lengths,
)
from perilune.memory.library import Library
from perilune.memory.store import Store
from tests.memory.conftest import add, ingest

BAD = Path(__file__).with_name("bad_worker.py")


def job(path: Path, **changes: int) -> Job:
    limits = {"max_pages": 100, "max_text_bytes": 10**7, "memory_bytes": 512 * 1024**2, "cpu_s": 30} | changes
    return Job(str(path), path.name, 1, 0, **limits)


def library_with(mode: str, store: Store, home: Path, **settings: object) -> Library:
    return Library(
        store,
        home,
        DocumentSettings(**settings),  # type: ignore[arg-type]
        starter=(sys.executable, str(BAD), mode),
        stall_s=2.0 if mode == "hang" else 60.0,
    )


@pytest.mark.parametrize(
    ("mode", "says", "settings"),
    [
        ("hang", "no progress", {}),
        ("spin", "1 s of computing", {"parser_cpu_s": 1}),
        ("abort", "crashed on this file (SIGABRT)", {}),
        ("raise", "failed on this file", {}),
        ("eat", "256 MB of memory", {"parser_memory": "256M"}),
        ("junk", "failed on this file", {}),
        ("lie", "failed on this file", {}),
    ],
)
def test_misbehaving_parser_becomes_an_error_record(
    mode: str, says: str, settings: dict[str, object], store: Store, tmp_path: Path
) -> None:
    library = library_with(mode, store, tmp_path, **settings)
    start = time.monotonic()
    record = ingest(library, b"text")
    assert record.status is FileStatus.ERROR
    assert record.error is not None
    assert says in record.error
    assert time.monotonic() - start < 120  # niced: beside a busy neighbour a second of computing takes long
    assert library.get_file("local", record.file_id) == record
    # What was parsed before stays searchable, and a good parser finishes the job later.
    assert library.search("local", [record.file_id], "page fine", 5)
    assert list(Library(store, tmp_path).parse("local", record.file_id))[-1].status is FileStatus.PREFILLING


def test_a_parser_that_closes_its_output_and_stays_is_killed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "LAST_WORD_S", 1.0)
    start = time.monotonic()
    record = ingest(library_with("mute", store, tmp_path), b"text")
    assert time.monotonic() - start < 20
    assert record.status is FileStatus.ERROR
    assert "stopped in the middle" in (record.error or "")


def test_files_a_parser_writes_are_bounded(store: Store, tmp_path: Path) -> None:
    record = ingest(library_with("write", store, tmp_path), b"text")
    assert record.status is FileStatus.ERROR
    written = Path("/tmp/perilune-bad-worker")
    assert written.stat().st_size <= 1024**2
    written.unlink()


def test_a_parser_reaches_no_network(store: Store, tmp_path: Path) -> None:
    code = "from perilune.memory.ingest.starter import leave_network\nprint(leave_network())"
    able = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    if able != "True":
        pytest.skip("this system forbids network namespaces; docs/documents.md says what then holds")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        record = ingest(library_with(f"connect-{listener.getsockname()[1]}", store, tmp_path), b"text")
        assert record.status is FileStatus.ERROR
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_closing_the_iterator_kills_the_parser(store: Store, tmp_path: Path) -> None:
    library = library_with("hang", store, tmp_path)
    record = add(library, b"text")
    progress = library.parse("local", record.file_id)
    assert next(r for r in progress if r.pages_parsed)
    start = time.monotonic()
    progress.close()  # type: ignore[attr-defined]
    assert time.monotonic() - start < 1
    assert library.get_file("local", record.file_id).status is FileStatus.PARSING


@pytest.mark.parametrize("mode", ["hang", "mute"])
def test_a_silent_parser_is_stopped_when_nobody_wants_its_work(mode: str, store: Store, tmp_path: Path) -> None:
    library = Library(store, tmp_path, starter=(sys.executable, str(BAD), mode))
    record = add(library, b"text")
    start = time.monotonic()
    seen = list(library.parse("local", record.file_id, lambda: time.monotonic() - start > 1.0))
    assert time.monotonic() - start < 5, "it was waited for until it counts as stalled"
    assert seen[-1].status is FileStatus.PARSING
    left = library.get_file("local", record.file_id)
    assert (left.status, left.error) == (FileStatus.PARSING, None)
    assert list(Library(store, tmp_path).parse("local", record.file_id))[-1].status is FileStatus.PREFILLING


def processes(text: str) -> tuple[Path, Path]:
    """The parser that wrote such a page, and its starter."""
    found = re.search(r"says parser (\d+) of (\d+)", text)
    assert found
    return Path("/proc", found[1]), Path("/proc", found[2])


def await_end(process: Path, within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while process.exists() and "Z" not in (process / "stat").read_text().split()[2]:
        assert time.monotonic() < deadline, f"{process} lives on"
        time.sleep(0.02)


def hanging(parsers: sandbox.Parsers, path: Path) -> tuple[Generator[Frame, None, None], Path, Path]:
    """A parser in the middle of a document, and its starter."""
    path.write_text("a page that hangs")
    frames = parsers.run(job(path))
    batch = next(frame for frame in frames if isinstance(frame, Batch))
    return frames, *processes(batch.pages[0].text)


@pytest.mark.parametrize("mode", ["hang", "deaf"])
def test_parser_and_starter_end_with_their_parent(mode: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("text")
    code = (
        "import sys, os, signal\n"
        "from perilune.memory.ingest.protocol import Batch, Job\n"
        "from perilune.memory.ingest.sandbox import Parsers\n"
        f"job = Job({str(tmp_path / 'notes.txt')!r}, 'n', 1, 0, 9, 10**6, 2**29, 60)\n"
        f"for frame in Parsers([sys.executable, {str(BAD)!r}, {mode!r}]).run(job):\n"
        "    if isinstance(frame, Batch):\n"
        "        print(frame.pages[0].text, flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    for process in processes(done.stdout):
        await_end(process)


@pytest.mark.parametrize(("mode", "says"), [("abort", "SIGABRT"), ("raise", "failed"), ("eat", "256 MB of memory")])
def test_one_bad_document_among_ten_good(mode: str, says: str, store: Store, tmp_path: Path) -> None:
    library = library_with(mode, store, tmp_path, parser_memory="256M")
    added = [add(library, b"bad" if n == 5 else f"good note {n}".encode(), f"{n}.txt") for n in range(11)]
    with ThreadPoolExecutor(2) as pool:
        progress = list(pool.map(lambda record: list(library.parse("local", record.file_id)), added))
    for n, (record, seen) in enumerate(zip(added, progress, strict=True)):
        assert {item.file_id for item in seen} == {record.file_id}
        assert [item.pages_parsed for item in seen] == sorted(item.pages_parsed for item in seen)
        assert seen[0].status is FileStatus.PARSING
        if n == 5:
            assert seen[-1].status is FileStatus.ERROR
            assert says in (seen[-1].error or "")
        else:
            assert seen[-1].status is FileStatus.PREFILLING
            assert library.text("local", record.file_id).strip() == f"good note {n}"


def test_documents_share_a_starter_and_nothing_else(store: Store, tmp_path: Path) -> None:
    library = library_with("look", store, tmp_path)
    texts = [library.text("local", ingest(library, f"look {n}".encode(), f"{n}.txt").file_id) for n in range(3)]
    assert len({processes(text)[1] for text in texts}) == 1
    assert len({processes(text)[0] for text in texts}) == 3
    for text in texts:
        assert "remembered None, held [0, 1, 2], nice 19" in text


def test_every_document_has_its_own_limits(store: Store, tmp_path: Path) -> None:
    library = library_with("compute", store, tmp_path, parser_cpu_s=1)
    records = [ingest(library, f"compute {n}".encode(), f"{n}.txt") for n in range(2)]  # 1.4 s, and 1 s for each
    assert [record.status for record in records] == [FileStatus.PREFILLING] * 2


@pytest.mark.parametrize("mode", ["hang", "deaf"])
def test_a_stopped_parser_is_gone_and_its_starter_serves_the_next(mode: str, tmp_path: Path) -> None:
    parsers = sandbox.Parsers((sys.executable, str(BAD), mode))
    frames, parser, starter = hanging(parsers, tmp_path / "a.txt")
    frames.close()
    assert not parser.exists()
    frames, parser, again = hanging(parsers, tmp_path / "b.txt")
    assert again == starter
    frames.close()
    del frames, parsers
    assert not parser.exists()
    assert not starter.exists(), "it outlived its owner"


def test_a_killed_parser_ends_its_document_only(tmp_path: Path) -> None:
    parsers = sandbox.Parsers((sys.executable, str(BAD), "hang"))
    frames, parser, starter = hanging(parsers, tmp_path / "a.txt")
    os.kill(int(parser.name), signal.SIGKILL)
    with pytest.raises(UnsupportedDocument, match="system stopped the parser"):
        list(frames)
    good = tmp_path / "good.txt"
    good.write_text("good text")
    assert isinstance(list(parsers.run(job(good)))[-1], Done)
    assert starter.exists()


def test_a_killed_starter_takes_its_parser_along_and_is_replaced(tmp_path: Path) -> None:
    parsers = sandbox.Parsers((sys.executable, str(BAD), "deaf"))
    good = tmp_path / "good.txt"
    good.write_text("good text")
    frames, parser, starter = hanging(parsers, tmp_path / "a.txt")
    os.kill(int(starter.name), signal.SIGKILL)
    await_end(parser)
    with pytest.raises(UnsupportedDocument, match="system stopped the parser"):
        list(frames)
    assert isinstance(list(parsers.run(job(good)))[-1], Done)
    frames, _, idle = hanging(parsers, tmp_path / "b.txt")
    frames.close()
    os.kill(int(idle.name), signal.SIGKILL)  # while it waits for a document
    assert isinstance(list(parsers.run(job(good)))[-1], Done)


def test_an_idle_starter_ends(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = f"import os\nopen({str(started)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    code += "from perilune.memory.ingest import starter\nstarter.IDLE_S = 0.2\nstarter.main()"
    parsers = sandbox.Parsers((sys.executable, "-c", code))
    good = tmp_path / "good.txt"
    good.write_text("good text")
    for number in (1, 2):
        assert isinstance(list(parsers.run(job(good)))[-1], Done)
        pids = started.read_text().split()
        assert len(pids) == number
        await_end(Path("/proc", pids[-1]))


def test_environment_is_bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    script = tmp_path / "show.py"
    seen = tmp_path / "seen"
    script.write_text(f"import os, sys; open({str(seen)!r}, 'w').write(' '.join(os.environ)); sys.exit(7)")
    with pytest.raises(Exception, match="failed"):
        list(sandbox.Parsers((sys.executable, str(script))).run(job(tmp_path / "x")))
    assert "OMP_NUM_THREADS" in seen.read_text()
    assert "SECRET_TOKEN" not in seen.read_text()


def test_the_log_says_where_a_parser_failed_and_nothing_of_the_document(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = ingest(library_with("quote", store, tmp_path), b"text")
    assert record.status is FileStatus.ERROR
    assert "bad_worker.py" in caplog.text
    assert "ValueError" in caplog.text
    assert "diary" not in caplog.text.lower()


def test_parser_starts_fast(tmp_path: Path) -> None:
    """By CPU time against a bare interpreter's, so that neighbours don't matter: 3 to 4 times as much."""
    path = tmp_path / "notes.txt"
    path.write_text("hello world\n")
    ratios = []
    for _ in range(3):
        start_s = children_s()
        subprocess.run([sys.executable, "-c", "import json, ctypes, subprocess, hashlib"], check=True)
        bare_s = children_s() - start_s
        frames = list(sandbox.Parsers().run(job(path)))
        ratios.append((children_s() - start_s - bare_s) / bare_s)
        assert len(frames) == 3
    assert min(ratios) < 8


def children_s() -> float:
    """CPU time of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_next_parser_costs_less_than_an_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello world\n")
    parsers = sandbox.Parsers()
    list(parsers.run(job(path)))
    ratios = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import json, ctypes, subprocess, hashlib"], check=True)
        bare = time.perf_counter() - start
        start = time.perf_counter()
        list(parsers.run(job(path)))
        ratios.append((time.perf_counter() - start) / bare)
    assert min(ratios) < 0.7


def test_parser_loads_no_database_and_no_arrays() -> None:
    code = "import sys, importlib, perilune.memory.ingest.starter, perilune.memory.ingest.formats as f\n"
    code += "[importlib.import_module(m) for m in f.PARSERS.values()]\n"
    code += "assert not {'sqlalchemy', 'numpy', 'torch', 'pydantic'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_frames_survive_the_wire() -> None:
    batch = Batch((PageText("one 管道\n", "line 1", "ab"), PageText("")), (Span(1, 0, 6),), b"\x00blob", "en")
    for message in (batch, Opened(None), Opened(7), Unchanged((("ab", "line 1"), ("cd", "")))):
        data = encode(message)
        json_bytes, blob_bytes = lengths(data[: LENGTHS.size])
        body = data[LENGTHS.size :]
        assert len(body) == json_bytes + blob_bytes
        assert decode(body[:json_bytes], body[json_bytes:]) == message


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"kind":"x"}', b'{"kind":"failed","message":1,"hint":""}', b"\xff"]
)
def test_bad_frames_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data, b"")
    with pytest.raises(ProtocolError):
        lengths(b"\xff" * 8)
