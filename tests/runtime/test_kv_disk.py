"""DiskKVStore: the store contract, then what only a disk can do: quota, damage, full disks, kill -9, one owner."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import Conflict, Overloaded
from perilune.runtime.kv.disk import DiskKVStore
from perilune.runtime.kv.manifest import Manifest
from perilune.runtime.kv.store import KVStore
from perilune.telemetry import Telemetry
from tests.contracts.kv_store import BLOCK_BYTES, KVStoreContract, chain, empty
from tests.fakes import MemoryKVStore

SEGMENT_BYTES = 64 * BLOCK_BYTES


class Counts:
    """A telemetry sink that remembers sums."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()

    def count(self, name: str, value: float, labels: dict[str, str]) -> None:
        self.sums[name + "".join(f"/{label}" for label in labels.values())] += int(value)

    def observe(self, name: str, value: float, labels: dict[str, str]) -> None: ...
    def gauge(self, name: str, value: float, labels: dict[str, str]) -> None: ...


class Folder:
    """A KV folder that can be opened again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 1.0
        self.counts = Counts()

    def open(self, quota_bytes: int | None = 1 << 30) -> DiskKVStore:
        return DiskKVStore(self.path, quota_bytes, Telemetry(self.counts), clock=self.tick)

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def segments(self) -> list[Path]:
        return sorted(self.path.glob("*.kv"))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "kv")


class TestDiskContract(KVStoreContract):
    @pytest.fixture
    def store(self, folder: Folder) -> Iterator[KVStore]:
        store = folder.open()
        yield store
        store.close()


class TestMemoryContract(KVStoreContract):
    @pytest.fixture
    def store(self) -> KVStore:
        return MemoryKVStore()


def same(into: list[memoryview], blocks: list[memoryview]) -> bool:
    return [bytes(view) for view in into] == [bytes(view) for view in blocks]


# ------------------------------------------------------------------------------------------- restart


def test_a_restart_keeps_blocks_owners_and_last_uses(folder: Folder) -> None:
    hashes, blocks = chain(b"a", 70)
    store = folder.open()
    store.save(hashes, blocks, "doc")
    listed = store.entries()
    store.close()
    again = folder.open()
    into = empty(70)
    assert again.load(hashes, into) == 70
    assert same(into, blocks)
    assert [(e.owner, e.blocks) for e in again.entries()] == [(e.owner, e.blocks) for e in listed]
    assert again.forget("doc") == 70 * BLOCK_BYTES
    assert folder.segments() == []
    again.close()


def test_files_are_private(folder: Folder) -> None:
    store = folder.open()
    store.save(*chain(b"a", 3), "doc")
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.segments())
    assert folder.path.stat().st_mode & 0o077 == 0
    store.close()


def test_one_owner_of_a_folder(folder: Folder) -> None:
    store = folder.open()
    with pytest.raises(Conflict, match=str(os.getpid())) as caught:
        folder.open()
    assert caught.value.hint
    store.close()
    folder.open().close()


def test_a_closed_store_ignores_late_calls(folder: Folder) -> None:
    store = folder.open()
    hashes, blocks = chain(b"a", 3)
    store.save(hashes, blocks, "doc")
    store.close()
    store.close()
    store.save(hashes, blocks, "doc")
    assert store.prefix_length(hashes) == 0
    assert store.load(hashes, empty(3)) == 0


# --------------------------------------------------------------------------------------------- quota


def test_quota_evicts_the_least_recently_used_document(folder: Folder) -> None:
    store = folder.open(quota_bytes=2 * SEGMENT_BYTES)
    one, two, three = (chain(name, 64) for name in (b"1", b"2", b"3"))
    store.save(*one, "one")
    store.save(*two, "two")
    assert store.load(one[0], empty(64)) == 64  # now `two` is the older
    store.save(*three, "three")
    assert [store.prefix_length(c[0]) for c in (one, two, three)] == [64, 0, 64]
    assert store.size_bytes == sum(path.stat().st_size for path in folder.segments()) <= 2 * SEGMENT_BYTES
    assert folder.counts.sums["kv_disk_evicted_blocks_total"] == 64
    store.close()


def test_a_chain_loses_its_tail_before_its_head(folder: Folder) -> None:
    store = folder.open(quota_bytes=3 * SEGMENT_BYTES)
    long, short = chain(b"long", 192), chain(b"short", 10)
    store.save(*long, "long")
    store.save(*short, "short")
    assert store.prefix_length(long[0]) == 128
    assert store.prefix_length(short[0]) == 10
    store.close()


def test_a_document_over_the_quota_keeps_its_head(folder: Folder) -> None:
    store = folder.open(quota_bytes=2 * SEGMENT_BYTES)
    long = chain(b"long", 192)
    store.save(*long, "long")
    assert store.prefix_length(long[0]) == 128
    assert folder.counts.sums["kv_disk_skipped_blocks_total/quota"] == 64
    store.close()


def test_a_smaller_quota_is_met_at_the_next_start(folder: Folder) -> None:
    store = folder.open()
    store.save(*chain(b"a", 64), "a")
    store.save(*chain(b"b", 64), "b")
    store.close()
    again = folder.open(quota_bytes=SEGMENT_BYTES)
    assert [entry.owner for entry in again.entries()] == ["b"]
    assert len(folder.segments()) == 1
    again.close()


def test_without_a_quota_nothing_is_evicted(folder: Folder) -> None:
    hashes, _ = saved(folder)
    before = folder.segments()
    store = folder.open(None)
    store.save(*chain(b"b", 100), "other")
    assert {entry.owner for entry in store.entries()} == {"doc", "other"}
    store.close()
    assert set(before) < set(folder.segments())
    assert hashes


def test_what_is_being_loaded_is_not_evicted(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder.open(quota_bytes=SEGMENT_BYTES)
    one, two = chain(b"1", 64), chain(b"2", 64)
    store.save(*one, "one")
    read_run = sys.modules["perilune.runtime.kv.disk"].__dict__["read_run"]

    def meanwhile(descriptor: int, start: int, into: list[memoryview]) -> None:
        store.save(*two, "two")
        read_run(descriptor, start, into)

    monkeypatch.setattr("perilune.runtime.kv.disk.read_run", meanwhile)
    into = empty(64)
    assert store.load(one[0], into) == 64
    assert same(into, one[1])
    assert [store.prefix_length(c[0]) for c in (one, two)] == [64, 0]
    store.close()


def test_forgetting_removes_the_bytes_of_a_shared_file(folder: Folder) -> None:
    store = folder.open()
    hashes, blocks = chain(b"a", 8)
    store.save(hashes, blocks, "one")
    store.save(hashes[:2], blocks[:2], "two")
    store.forget("one")
    held = b"".join(path.read_bytes() for path in folder.segments())
    assert bytes(blocks[1]) in held
    assert not any(bytes(block) in held for block in blocks[2:])
    store.close()
    again = folder.open()
    assert again.load(hashes, empty(8)) == 2
    again.close()


# -------------------------------------------------------------------------------------------- damage


def flip_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << (position % 8)
    path.write_bytes(data)


def saved(folder: Folder, blocks: int = 100) -> tuple[list[bytes], list[memoryview]]:
    hashes, data = chain(b"a", blocks)
    store = folder.open()
    store.save(hashes, data, "doc")
    store.close()
    return hashes, data


@settings(max_examples=30, deadline=None)
@given(position=st.integers(0, SEGMENT_BYTES - 1))
def test_a_flipped_bit_is_a_shorter_prefix(tmp_path_factory: pytest.TempPathFactory, position: int) -> None:
    folder = Folder(tmp_path_factory.mktemp("flip") / "kv")
    hashes, blocks = saved(folder)
    flip_bit(folder.segments()[0], position)
    store = folder.open()
    into = empty(100)
    damaged = position // BLOCK_BYTES
    assert store.load(hashes, into) == damaged
    assert same(into[:damaged], blocks[:damaged])
    assert store.prefix_length(hashes) == damaged
    assert folder.counts.sums["kv_disk_damaged_blocks_total/checksum"] == 1
    store.save(hashes, blocks, "doc")  # computed again
    assert store.load(hashes, into) == 100
    assert same(into, blocks)
    store.close()


@pytest.mark.parametrize("while_open", [False, True])
@pytest.mark.parametrize("length", [0, 1, BLOCK_BYTES * 10 + 5, SEGMENT_BYTES - 1])
def test_a_truncated_file_is_a_shorter_prefix(folder: Folder, length: int, while_open: bool) -> None:
    hashes, blocks = saved(folder)
    store = folder.open() if while_open else None
    os.truncate(folder.segments()[0], length)
    store = store or folder.open()
    into = empty(100)
    count = store.load(hashes, into)
    assert count == (length // BLOCK_BYTES if while_open else 0)
    assert same(into[:count], blocks[:count])
    assert store.prefix_length(hashes) == count
    assert folder.counts.sums.total() > 0
    store.close()
    folder.open().close()


@pytest.mark.parametrize("while_open", [False, True])
def test_a_missing_file_is_a_shorter_prefix(folder: Folder, while_open: bool) -> None:
    hashes, blocks = saved(folder)
    store = folder.open() if while_open else None
    folder.segments()[1].unlink()
    store = store or folder.open()
    into = empty(100)
    assert store.load(hashes, into) == 64
    assert same(into[:64], blocks[:64])
    assert store.prefix_length(hashes) == 64
    assert folder.counts.sums["kv_disk_damaged_blocks_total/missing"] == 36
    store.close()


@pytest.mark.parametrize("damage", ["garbage", "zeros", "cut", "old version", "no table"])
def test_a_damaged_manifest_is_an_empty_store(folder: Folder, damage: str) -> None:
    hashes, blocks = saved(folder)
    manifest = folder.path / "manifest.sqlite"
    size = manifest.stat().st_size
    if damage == "garbage":
        manifest.write_bytes(random.Random(1).randbytes(size))
    elif damage == "zeros":
        manifest.write_bytes(b"\0" * size)
    elif damage == "cut":
        os.truncate(manifest, size // 2)
    else:
        database = sqlite3.connect(manifest)
        database.execute("PRAGMA user_version=99" if damage == "old version" else "DROP TABLE blocks")
        database.close()
    store = folder.open()
    assert store.prefix_length(hashes) == 0
    assert folder.segments() == []
    assert folder.counts.sums["kv_disk_manifest_resets_total"] == 1
    store.save(hashes, blocks, "doc")
    assert store.load(hashes, empty(100)) == 100
    store.close()


@pytest.mark.parametrize("when", ["preparing", "reading"])
def test_a_manifest_that_is_locked_or_on_a_full_disk_loses_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    hashes, _ = saved(folder)
    before = folder.segments()
    if when == "preparing":  # as a backup tool holds it
        blocker = sqlite3.connect(folder.path / "manifest.sqlite", isolation_level=None)
        blocker.execute("PRAGMA locking_mode=EXCLUSIVE")
        blocker.execute("BEGIN EXCLUSIVE")
        with pytest.raises(Overloaded) as caught:
            folder.open()
        blocker.close()
    else:
        with monkeypatch.context() as patch:
            patch.setattr(Manifest, "drop", full_disk)
            with pytest.raises(Overloaded) as caught:
                folder.open()
    assert caught.value.hint
    assert folder.segments() == before
    assert "kv_disk_manifest_resets_total" not in folder.counts.sums
    store = folder.open()
    assert store.load(hashes, empty(100)) == 100
    store.close()


def full_disk(*arguments: object) -> None:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


def test_swapped_files_are_never_served(folder: Folder) -> None:
    hashes, blocks = saved(folder, 128)
    first, second = folder.segments()
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    store = folder.open()
    assert store.load(hashes, empty(128)) == 0
    store.close()
    assert blocks


def test_strays_are_swept_and_foreign_files_left(folder: Folder) -> None:
    hashes, _ = saved(folder)
    for name in ("000000000099.kv", "000000000100.kv.tmp", "notes.txt"):
        (folder.path / name).write_bytes(b"x")
    store = folder.open()
    assert not (folder.path / "000000000099.kv").exists()
    assert not (folder.path / "000000000100.kv.tmp").exists()
    assert (folder.path / "notes.txt").exists()
    assert store.load(hashes, empty(100)) == 100
    store.close()


# ----------------------------------------------------------------------------------------- full disk


@pytest.mark.parametrize("call", ["writev", "fsync", "open"])
def test_a_full_disk_skips_the_save(folder: Folder, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store = folder.open()
    hashes, blocks = chain(b"a", 10)
    real: Callable[..., object] = getattr(os, call)

    def full(*arguments: object) -> object:
        if call == "open" and not str(arguments[0]).endswith(".tmp"):
            return real(*arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        store.save(hashes, blocks, "doc")
    assert store.prefix_length(hashes) == 0
    assert list(folder.path.glob("*.kv*")) == []
    assert folder.counts.sums["kv_disk_skipped_blocks_total/io"] == 10
    store.save(hashes, blocks, "doc")
    assert store.load(hashes, empty(10)) == 10
    store.close()


def test_a_manifest_that_cannot_be_written_skips_the_save(folder: Folder) -> None:
    store = folder.open()
    hashes, blocks = chain(b"a", 10)
    blocker = sqlite3.connect(folder.path / "manifest.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    store.save(hashes, blocks, "doc")  # gives up after SQLite's own wait
    blocker.execute("ROLLBACK")
    blocker.close()
    assert store.prefix_length(hashes) == 0
    assert folder.segments() == []
    store.save(hashes, blocks, "doc")
    assert store.load(hashes, empty(10)) == 10
    store.close()


LIMITED = """
import resource, sys
from pathlib import Path
from perilune.runtime.kv.disk import DiskKVStore
from tests.contracts.kv_store import chain, empty
store = DiskKVStore(Path(sys.argv[1]), 1 << 30)
small, large = chain(b"small", 10), chain(b"large", 64)
store.save(*small, "small")
limit = 12 * 1024  # a real failure of write(2), in the middle of a segment
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
store.save(*large, "large")
print(store.prefix_length(large[0]), store.load(small[0], empty(10)))
"""


def test_a_write_that_fails_half_way_leaves_nothing(folder: Folder) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder.path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["0", "10"], done.stderr
    store = folder.open()
    assert store.load(chain(b"small", 10)[0], empty(10)) == 10
    assert len(folder.segments()) == 1
    store.close()


# ------------------------------------------------------------------------------------------- kill -9

WRITER = """
import itertools, sys
from pathlib import Path
from perilune.runtime.kv.disk import DiskKVStore
from tests.contracts.kv_store import chain
store = DiskKVStore(Path(sys.argv[1]), 80 * 64 * 256)
print("ready", flush=True)
for number in itertools.count(int(sys.argv[2])):
    name = f"doc{number}"
    store.save(*chain(name.encode(), 150), name)
    print(name, flush=True)
    if number % 3 == 2:
        print("forgetting", name, flush=True)
        store.forget(name)
"""


def check_after_kill(folder: Folder, said: list[str]) -> bool:
    """Everything announced is there, and nothing wrong. True when the kill cut a save or a forget in two."""
    swept = folder.counts.sums["kv_disk_swept_files_total"]
    store = folder.open()
    cut = folder.counts.sums["kv_disk_swept_files_total"] > swept
    cut = cut or any(entry.blocks < 150 for entry in store.entries())
    forgotten = {line.split()[1] for line in said if line.startswith("forgetting")}
    kept = [name for name in said if name.startswith("doc") and name not in forgotten]
    for name in kept:
        hashes, blocks = chain(name.encode(), 150)
        into = empty(150)
        assert store.load(hashes, into) == 150, f"{name} was saved and is lost"
        assert same(into, blocks)
    for entry in store.entries():
        hashes, blocks = chain(entry.owner.encode(), 150)
        into = empty(150)
        count = store.load(hashes, into)
        assert same(into[:count], blocks[:count])
    assert store.size_bytes == sum(path.stat().st_size for path in folder.segments())
    assert not list(folder.path.glob("*.tmp"))
    store.close()
    return cut


def test_kill_9_while_saving_leaves_a_usable_store(tmp_path: Path) -> None:
    rng = random.Random(20261130)
    folder = Folder(tmp_path / "kv")
    interrupted = 0
    for turn in range(24):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder.path), str(turn * 1000)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(rng.random() * 0.06)
        writer.send_signal(signal.SIGKILL)
        said = writer.stdout.read().splitlines()
        writer.stdout.close()
        writer.wait()
        interrupted += check_after_kill(folder, said)
        shutil.rmtree(folder.path)
    assert interrupted >= 6, "the kills don't come in the middle of the work"


# --------------------------------------------------------------------------------------------- speed


def test_loading_runs_near_memory_speed(tmp_path: Path) -> None:
    """120 blocks of SmolLM2's size against a plain copy of as many bytes in the same run (ratio, not seconds)."""
    size, count = 737_280, 120
    source = bytearray(os.urandom(size)) * count
    hashes, _ = chain(b"a", count)
    whole = memoryview(source)
    blocks = [whole[i * size : (i + 1) * size] for i in range(count)]
    store = DiskKVStore(tmp_path / "kv", 1 << 30)
    store.save(hashes, blocks, "doc")
    target = memoryview(bytearray(size * count))
    into = [target[i * size : (i + 1) * size] for i in range(count)]

    def seconds(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def copy() -> None:
        target[:] = whole

    def load() -> None:
        assert store.load(hashes, into) == count

    pairs = [(seconds(load), seconds(copy)) for _ in range(5)]
    loads, copies = sorted(p[0] for p in pairs), sorted(p[1] for p in pairs)
    assert loads[2] < 8 * copies[2], f"load {loads[2]:.3f} s, copy {copies[2]:.3f} s"
    assert target == whole
    store.close()
