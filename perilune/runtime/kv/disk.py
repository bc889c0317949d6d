"""KV blocks on disk: the `KVStore` of one machine (spec R9, X1).

A folder of segment files (`segment`), their table of contents (`manifest`) and a lock: one process owns a folder.
Knows durability, quota and damage. Knows nothing of models, sequences or scheduling.

Order of a save: bytes to a temporary file, fsync, rename, fsync of the folder, manifest row. So a kill at any point
leaves a whole file without a row or a temporary one, and both are swept at the next start. What a read finds
damaged, cut or missing is dropped and counted; the caller sees a shorter prefix.

Two locks: `_writing` orders everything that changes files and manifest, and is held during I/O; `_indexing` guards
the in-memory index and never is, so that look-ups from the engine thread don't wait for a disk.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path

from perilune.errors import Conflict, Overloaded
from perilune.runtime.kv.disk_index import DiskIndex
from perilune.runtime.kv.manifest import BlockPlace, Manifest, ManifestDamaged, SegmentFile, damage_named
from perilune.runtime.kv.segment import SEGMENT_BLOCKS, TEMPORARY, checksum, read_run, sync_folder, write_segment
from perilune.runtime.kv.spec import BlockHash
from perilune.runtime.kv.store import KVEntry
from perilune.telemetry import Telemetry

_SUFFIX = ".kv"
_MANIFEST = "manifest.sqlite"
_LOG = logging.getLogger(__name__)


class DiskKVStore:
    """Opens (or makes) a KV folder. Raises `Conflict` when another process, or another store, has it open, and
    `Overloaded` when its manifest is locked or its disk is full; a damaged manifest is an empty folder.

    `quota_bytes` None evicts nothing, ever: for whoever only looks or deletes by owner."""

    def __init__(
        self,
        folder: Path,
        quota_bytes: int | None,
        telemetry: Telemetry | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._quota_bytes = quota_bytes
        self._telemetry = telemetry or Telemetry()
        self._clock = clock
        self._writing = threading.Lock()
        self._indexing = threading.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_file = _take_folder(folder)
        try:
            self._manifest, self._index = self._recover()
            self._next_file_id = 1 + max((file.file_id for file in self._manifest.files()), default=0)
            self._make_room(0, None)
        except BaseException:
            os.close(self._lock_file)
            raise
        self._closed = False

    # --------------------------------------------------------------------------------------- look-ups

    def prefix_length(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading hashes are stored. Counts as a use of their owners' blocks."""
        with self._indexing:
            count = self._index.prefix_length(hashes)
            self._index.touch(hashes[:count], self._clock())
            return count

    def entries(self) -> list[KVEntry]:
        with self._indexing:
            return self._index.entries()

    @property
    def size_bytes(self) -> int:
        """Bytes of all segment files."""
        return self._index.size_bytes

    # ------------------------------------------------------------------------------------------- load

    def load(self, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> int:
        """See `KVStore.load`. Page-cache reads run at memory speed: one copy and one checksum per block."""
        with self._indexing:
            places = self._index.places(hashes)
            file_ids = {place.file_id for place in places}
            names = {file_id: self._index.file(file_id).name for file_id in file_ids}
            self._index.pin(file_ids)
            self._index.touch(hashes[: len(places)], self._clock())
        filled = 0
        try:
            for file_id, group in groupby(places, key=lambda place: place.file_id):
                run = list(group)
                end = filled + len(run)
                good = self._load_run(names[file_id], hashes[filled:end], run, into[filled:end])
                filled += good
                if good < len(run):
                    break
        finally:
            with self._indexing:
                self._index.unpin(file_ids)
        self._telemetry.count("kv_disk_loaded_blocks_total", filled)
        return filled

    def _load_run(
        self,
        name: str,
        hashes: Sequence[BlockHash],
        places: Sequence[BlockPlace],
        into: Sequence[memoryview],
    ) -> int:
        """Fill and verify blocks of one file; returns how many leading ones are right."""
        try:
            descriptor = os.open(self._folder / name, os.O_RDONLY)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                self._drop_damaged(hashes, "missing")
            else:  # too many open files, a failing disk: the blocks may be fine later
                self._telemetry.count("kv_disk_load_failures_total")
                _LOG.warning("a KV file can't be opened: %s", error)
            return 0
        try:
            return self._fill(descriptor, hashes, places, into)
        finally:
            os.close(descriptor)

    def _fill(
        self,
        descriptor: int,
        hashes: Sequence[BlockHash],
        places: Sequence[BlockPlace],
        into: Sequence[memoryview],
    ) -> int:
        length = os.fstat(descriptor).st_size
        cut = [name for name, p in zip(hashes, places, strict=True) if p.start + p.length > length]
        if cut:
            self._drop_damaged(cut, "truncated")
        whole = hashes.index(cut[0]) if cut else len(places)
        for first, end in _contiguous(places[:whole]):
            good = self._read_verified(descriptor, hashes[first:end], places[first:end], into[first:end])
            if good < end - first:
                return first + good
        return whole

    def _read_verified(
        self,
        descriptor: int,
        hashes: Sequence[BlockHash],
        places: Sequence[BlockPlace],
        into: Sequence[memoryview],
    ) -> int:
        if any(len(view) != place.length for view, place in zip(into, places, strict=True)):
            self._drop_damaged(hashes, "length")
            return 0
        try:
            read_run(descriptor, places[0].start, into)
        except (OSError, EOFError) as error:  # a bad sector somewhere in the run: none of it is trusted
            _LOG.warning("a KV file can't be read: %s", error)
            self._drop_damaged(hashes, "unreadable")
            return 0
        for index, place in enumerate(places):
            if checksum(into[index]) != place.checksum:
                self._drop_damaged([hashes[index]], "checksum")
                return index
        return len(places)

    def _drop_damaged(self, hashes: Sequence[BlockHash], reason: str) -> None:
        self._telemetry.count("kv_disk_damaged_blocks_total", len(hashes), reason=reason)
        _LOG.warning("%d KV blocks dropped (%s); they will be computed again", len(hashes), reason)
        with self._writing:
            self._drop_blocks(list(hashes))

    # ------------------------------------------------------------------------------------------- save

    def save(self, hashes: Sequence[BlockHash], blocks: Sequence[memoryview], owner: str) -> None:
        """See `KVStore.save`. A document that outgrows the quota keeps its head."""
        with self._writing:
            if self._closed:
                return
            missing: dict[BlockHash, memoryview] = {}
            known: list[BlockHash] = []
            with self._indexing:
                for name, view in zip(hashes, blocks, strict=True):
                    if name in self._index:
                        known.append(name)
                    else:
                        missing[name] = view
            try:
                self._own(known, owner)
                self._save_missing(missing, owner)
            except (OSError, sqlite3.Error) as error:
                self._skip(len(missing), "io")
                _LOG.warning("KV isn't saved: %s", error)

    def _own(self, hashes: Sequence[BlockHash], owner: str) -> None:
        with self._indexing:
            fresh = [name for name in hashes if owner not in self._index.owners(name)]
        if fresh:
            self._manifest.own((owner, name) for name in fresh)
        if hashes:
            with self._indexing:
                self._index.own(owner, fresh, self._clock())

    def _save_missing(self, missing: dict[BlockHash, memoryview], owner: str) -> None:
        names = list(missing)
        for start in range(0, len(names), SEGMENT_BLOCKS):
            batch = names[start : start + SEGMENT_BLOCKS]
            views = [missing[name] for name in batch]
            if not self._make_room(sum(len(view) for view in views), owner):
                self._skip(len(names) - start, "quota")
                return
            self._write(batch, views, {name: frozenset({owner}) for name in batch})
            self._telemetry.count("kv_disk_saved_blocks_total", len(batch))

    def _skip(self, blocks: int, reason: str) -> None:
        self._telemetry.count("kv_disk_skipped_blocks_total", blocks, reason=reason)

    def _write(
        self,
        names: Sequence[BlockHash],
        views: Sequence[memoryview],
        owners: dict[BlockHash, frozenset[str]],
    ) -> None:
        """One durable segment file with its manifest rows, then the index."""
        file_id, self._next_file_id = self._next_file_id, self._next_file_id + 1
        places: dict[BlockHash, BlockPlace] = {}
        start = 0
        for name, view in zip(names, views, strict=True):
            places[name] = BlockPlace(file_id, start, len(view), checksum(view))
            start += len(view)
        file = SegmentFile(file_id, f"{file_id:012d}{_SUFFIX}", start)
        path = self._folder / file.name
        pairs = [(owner, name) for name in names for owner in owners[name]]
        write_segment(path, views)
        try:
            self._manifest.add(file, places, pairs)
        except sqlite3.Error:
            path.unlink()
            raise
        with self._indexing:
            self._index.add(file, places)
            for owner, name in pairs:
                self._index.own(owner, [name], self._clock())

    def _make_room(self, size_bytes: int, owner: str | None) -> bool:
        """Evict until `size_bytes` more fit the quota. False, and nothing evicted, when that can't be."""
        if self._quota_bytes is None:
            return True
        with self._indexing:
            excess = self._index.size_bytes + size_bytes - self._quota_bytes
            victims = self._index.victims(excess, owner) if size_bytes <= self._quota_bytes else None
            dropped = [self._index.remove_file(file.file_id) for file in victims or ()]
        if victims:
            self._manifest.drop(list(chain.from_iterable(dropped)), [file.file_id for file in victims])
            self._unlink(victims)
            self._telemetry.count("kv_disk_evicted_blocks_total", sum(map(len, dropped)))
        return victims is not None

    # ----------------------------------------------------------------------------------------- forget

    def forget(self, owner: str) -> int:
        """See `KVStore.forget`. A file that others share is written anew without this owner's bytes."""
        with self._writing:
            with self._indexing:
                before = self._index.size_bytes
                farewell = self._index.disown(owner)
                orphans = set(farewell.blocks)
                kept = {
                    file_id: [name for name in self._index.blocks_in(file_id) if name not in orphans]
                    for file_id in farewell.files
                }
            for file_id, names in kept.items():
                if names:
                    self._move(file_id, names)
            self._drop_files(farewell.files)
            self._manifest.disown(owner)
            return before - self._index.size_bytes

    def _move(self, file_id: int, names: Sequence[BlockHash]) -> None:
        """Copy blocks of a file into a new one. Those that can't be are lost: KV is a cache."""
        with self._indexing:
            places = [self._index.place(name) for name in names]
            owners = {name: self._index.owners(name) for name in names}
            path = self._folder / self._index.file(file_id).name
        views = [memoryview(bytearray(place.length)) for place in places]
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                for place, view in zip(places, views, strict=True):
                    read_run(descriptor, place.start, [view])
            finally:
                os.close(descriptor)
            good = [i for i, place in enumerate(places) if checksum(views[i]) == place.checksum]
            if good:
                self._write([names[i] for i in good], [views[i] for i in good], owners)
        except (OSError, EOFError, sqlite3.Error) as error:
            self._telemetry.count("kv_disk_damaged_blocks_total", len(names), reason="move")
            _LOG.warning("shared KV blocks are lost while an owner is forgotten: %s", error)

    def _drop_files(self, file_ids: Sequence[int]) -> None:
        with self._indexing:
            files = [self._index.file(file_id) for file_id in file_ids]
            names = [name for file_id in file_ids for name in self._index.remove_file(file_id)]
        self._unlink(files)  # bytes first: a row without a file is dropped at the next start, never served
        self._manifest.drop(names, file_ids)

    def _drop_blocks(self, hashes: Sequence[BlockHash]) -> None:
        with self._indexing:
            emptied = self._index.drop(hashes)
        self._unlink(emptied)
        try:
            self._manifest.drop(hashes, [file.file_id for file in emptied])
        except sqlite3.Error as error:  # found damaged again after a restart
            _LOG.warning("the KV manifest can't be changed: %s", error)

    def _unlink(self, files: Sequence[SegmentFile]) -> None:
        for file in files:
            (self._folder / file.name).unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------ open, close

    def close(self) -> None:
        """Note the last uses and give the folder back. Waits for a running save; later saves are ignored."""
        with self._writing:
            if self._closed:
                return
            self._closed = True
            with self._indexing:
                last_used = self._index.last_used()
                self._index = DiskIndex()
            try:
                self._manifest.touch(last_used)
            except sqlite3.Error as error:
                _LOG.warning("last uses of KV aren't noted: %s", error)
            self._manifest.close()
            os.close(self._lock_file)

    def _recover(self) -> tuple[Manifest, DiskIndex]:
        path = self._folder / _MANIFEST
        try:
            return self._read_manifest(path)
        except ManifestDamaged as error:
            _LOG.warning("the KV manifest is damaged (%s); the KV folder starts empty", error)
            self._telemetry.count("kv_disk_manifest_resets_total")
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            return self._read_manifest(path)

    def _read_manifest(self, path: Path) -> tuple[Manifest, DiskIndex]:
        try:
            manifest = Manifest(path)
            try:
                with damage_named():
                    return manifest, self._reconcile(manifest)
            except BaseException:
                manifest.close()
                raise
        except sqlite3.Error as error:  # locked, disk full, no permission: what is stored is as good as before
            _LOG.warning("the KV manifest can't be opened: %s", error)
            raise Overloaded(
                "The KV folder can't be opened: its table of contents is locked, or the disk is full.",
                hint="Free disk space, end what uses the folder, or set another `home`; nothing was deleted.",
            ) from error

    def _reconcile(self, manifest: Manifest) -> DiskIndex:
        """An index of what the manifest says and the folder confirms; the rest of both is swept."""
        index = DiskIndex()
        present = {entry.name: entry.stat().st_size for entry in os.scandir(self._folder) if entry.is_file()}
        files = {file.file_id: file for file in manifest.files()}
        whole = {i: file for i, file in files.items() if present.get(file.name) == file.size_bytes}
        blocks: dict[int, dict[BlockHash, BlockPlace]] = {}
        lost: list[BlockHash] = []
        for name, place in manifest.blocks():
            if place.file_id in whole:
                blocks.setdefault(place.file_id, {})[name] = place
            else:
                lost.append(name)
        for file_id, places in blocks.items():
            index.add(whole[file_id], places)
        last_used = manifest.last_used()
        for owner, name in manifest.owners():
            if name in index:
                index.own(owner, [name], last_used.get(owner, 0.0))
        if lost:
            self._telemetry.count("kv_disk_damaged_blocks_total", len(lost), reason="missing")
        manifest.drop(lost, [file_id for file_id in files if file_id not in blocks])
        self._sweep(present, {whole[file_id].name for file_id in blocks})
        return index

    def _sweep(self, present: dict[str, int], keep: set[str]) -> None:
        strays = [n for n in present if n.endswith((_SUFFIX, _SUFFIX + TEMPORARY)) and n not in keep]
        for name in strays:
            (self._folder / name).unlink(missing_ok=True)
        if strays:
            sync_folder(self._folder)
            self._telemetry.count("kv_disk_swept_files_total", len(strays))


def _contiguous(places: Sequence[BlockPlace]) -> Iterator[tuple[int, int]]:
    """Index ranges of places that follow one another in their file, so that each is one read."""
    first = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end].start != places[end - 1].start + places[end - 1].length:
            yield first, end
            first = end


def _take_folder(folder: Path) -> int:
    """An open, locked descriptor; the lock goes with the process, however it ends."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(descriptor, 32).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise Conflict(
            f"The KV folder is in use{f' by process {holder}' if holder else ''}.",
            hint="Ask through the running server, stop it, or set another `home`.",
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
