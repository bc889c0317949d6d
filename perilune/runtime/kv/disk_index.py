"""What a KV folder holds, in memory: the copy of the manifest that look-ups and eviction read.

Knows hashes, places, owners and sizes. Knows nothing of SQLite or of bytes, and takes no locks: `disk.DiskKVStore`
holds its index lock around every call, and no call does I/O.

Recency belongs to owners, not to files: a document is one chain of blocks, useless without its head, so all its
files are equally recent, and its last file goes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from perilune.runtime.kv.manifest import BlockPlace, SegmentFile
from perilune.runtime.kv.spec import BlockHash
from perilune.runtime.kv.store import KVEntry


@dataclass(slots=True)
class _Contents:
    """A file, the blocks in it that still count, whose they are, and how many loads are reading it."""

    file: SegmentFile
    blocks: set[BlockHash] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)
    pins: int = 0


@dataclass(frozen=True, slots=True)
class Farewell:
    """What dropping an owner takes away: blocks nobody else owns, and the files that hold them."""

    blocks: list[BlockHash]
    files: list[int]


class DiskIndex:
    """Empty at first; `DiskKVStore` fills it from the manifest."""

    def __init__(self) -> None:
        self._places: dict[BlockHash, BlockPlace] = {}
        self._files: dict[int, _Contents] = {}
        self._owners: dict[BlockHash, set[str]] = {}
        self._owned: dict[str, set[BlockHash]] = {}
        self._last_used: dict[str, float] = {}
        self.size_bytes = 0

    # ---------------------------------------------------------------------------------------- reading

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def prefix_length(self, hashes: Sequence[BlockHash]) -> int:
        for index, name in enumerate(hashes):
            if name not in self._places:
                return index
        return len(hashes)

    def places(self, hashes: Sequence[BlockHash]) -> list[BlockPlace]:
        """Where the leading stored hashes are."""
        return [self._places[name] for name in hashes[: self.prefix_length(hashes)]]

    def file(self, file_id: int) -> SegmentFile:
        return self._files[file_id].file

    def blocks_in(self, file_id: int) -> list[BlockHash]:
        """A file's blocks in file order; empty for a file that is gone."""
        contents = self._files.get(file_id)
        names = contents.blocks if contents else set()
        return sorted(names, key=lambda name: self._places[name].start)

    def place(self, name: BlockHash) -> BlockPlace:
        return self._places[name]

    def owners(self, name: BlockHash) -> frozenset[str]:
        return frozenset(self._owners.get(name, ()))

    def last_used(self) -> dict[str, float]:
        return {owner: when for owner, when in self._last_used.items() if owner in self._owned}

    def entries(self) -> list[KVEntry]:
        return [
            KVEntry(owner, len(names), sum(self._places[n].length for n in names), self._last_used[owner])
            for owner, names in sorted(self._owned.items())
        ]

    # ---------------------------------------------------------------------------------------- writing

    def add(self, file: SegmentFile, blocks: Mapping[BlockHash, BlockPlace]) -> None:
        contents = self._files[file.file_id] = _Contents(file, set(blocks))
        self.size_bytes += file.size_bytes
        for name, place in blocks.items():
            old = self._places.get(name)
            if old is not None:
                self._files[old.file_id].blocks.discard(name)
            self._places[name] = place
            contents.owners |= self._owners.get(name, set())

    def own(self, owner: str, hashes: Iterable[BlockHash], now: float) -> None:
        """Add an owner to stored blocks."""
        for name in hashes:
            self._owners.setdefault(name, set()).add(owner)
            self._owned.setdefault(owner, set()).add(name)
            self._files[self._places[name].file_id].owners.add(owner)
        self._last_used[owner] = now

    def touch(self, hashes: Sequence[BlockHash], now: float) -> None:
        """The owners of these blocks were used now."""
        for file_id in {self._places[name].file_id for name in hashes if name in self._places}:
            for owner in self._files[file_id].owners:
                self._last_used[owner] = now

    def pin(self, file_ids: Iterable[int]) -> None:
        for file_id in file_ids:
            self._files[file_id].pins += 1

    def unpin(self, file_ids: Iterable[int]) -> None:
        for file_id in file_ids:
            if file_id in self._files:
                self._files[file_id].pins -= 1

    def drop(self, hashes: Iterable[BlockHash]) -> list[SegmentFile]:
        """Forget blocks; returns the files that hold nothing any more, forgotten too."""
        emptied: list[SegmentFile] = []
        for name in hashes:
            place = self._places.pop(name, None)
            if place is None:
                continue
            for owner in self._owners.pop(name, ()):
                self._owned[owner].discard(name)
                if not self._owned[owner]:
                    del self._owned[owner]
            contents = self._files[place.file_id]
            contents.blocks.discard(name)
            if not contents.blocks:
                emptied.append(self._remove(place.file_id))
        return emptied

    def remove_file(self, file_id: int) -> list[BlockHash]:
        """Forget a file with its blocks; returns their hashes."""
        names = self.blocks_in(file_id)
        if not self.drop(names) and file_id in self._files:
            self._remove(file_id)
        return names

    def _remove(self, file_id: int) -> SegmentFile:
        file = self._files.pop(file_id).file
        self.size_bytes -= file.size_bytes
        return file

    def disown(self, owner: str) -> Farewell:
        """Drop an owner from every block. The blocks left without one still have their places."""
        orphans: list[BlockHash] = []
        files: set[int] = set()
        for name in self._owned.pop(owner, set()):
            self._owners[name].discard(owner)
            if not self._owners[name]:
                orphans.append(name)
                files.add(self._places[name].file_id)
        for contents in self._files.values():
            contents.owners.discard(owner)
        self._last_used.pop(owner, None)
        return Farewell(orphans, sorted(files))

    def victims(self, excess_bytes: int, spare: str | None) -> list[SegmentFile] | None:
        """Files to evict, least recently used first, so that at least `excess_bytes` go.

        Never a pinned file, and never one of `spare`'s: evicting a chain's head for its tail helps nobody.
        None when that can't free enough.
        """
        order = sorted(
            (contents for contents in self._files.values() if not contents.pins),
            key=lambda c: (max((self._last_used[o] for o in c.owners), default=0.0), -c.file.file_id),
        )
        chosen: list[SegmentFile] = []
        for contents in order:
            if excess_bytes <= 0:
                break
            if spare not in contents.owners:
                chosen.append(contents.file)
                excess_bytes -= contents.file.size_bytes
        return chosen if excess_bytes <= 0 else None
