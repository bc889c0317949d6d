"""What every `KVStore` must do. Subclass in a test module and give `store` and `reopen`.

class TestDisk(KVStoreContract):
    @pytest.fixture
    def store(self, tmp_path): ...
"""

from __future__ import annotations

import random
import threading

import pytest

from perilune.runtime.kv.spec import BlockHash, block_hashes
from perilune.runtime.kv.store import KVStore

BLOCK_BYTES = 256


def chain(salt: bytes, blocks: int) -> tuple[list[BlockHash], list[memoryview]]:
    """Hashes and bytes of a document of `blocks` blocks."""
    hashes = block_hashes(list(range(blocks * 32)), salt)
    rng = random.Random(salt)
    return hashes, [memoryview(rng.randbytes(BLOCK_BYTES)) for _ in range(blocks)]


def empty(blocks: int) -> list[memoryview]:
    return [memoryview(bytearray(BLOCK_BYTES)) for _ in range(blocks)]


class KVStoreContract:
    @pytest.fixture
    def store(self) -> KVStore:
        raise NotImplementedError

    def test_what_is_saved_comes_back_byte_for_byte(self, store: KVStore) -> None:
        hashes, blocks = chain(b"a", 130)
        store.save(hashes, blocks, "doc")
        assert store.prefix_length(hashes) == 130
        into = empty(130)
        assert store.load(hashes, into) == 130
        assert [bytes(view) for view in into] == [bytes(view) for view in blocks]

    def test_any_part_of_a_chain_loads(self, store: KVStore) -> None:
        hashes, blocks = chain(b"a", 70)
        store.save(hashes, blocks, "doc")
        for start, end in [(0, 1), (60, 70), (5, 66), (69, 70)]:
            into = empty(end - start)
            assert store.load(hashes[start:end], into) == end - start
            assert [bytes(view) for view in into] == [bytes(view) for view in blocks[start:end]]

    def test_nothing_is_found_in_an_empty_store(self, store: KVStore) -> None:
        hashes, _ = chain(b"a", 3)
        assert store.prefix_length(hashes) == 0
        assert store.load(hashes, empty(3)) == 0
        assert store.prefix_length([]) == 0
        assert store.load([], []) == 0
        assert store.entries() == []

    def test_a_gap_ends_the_prefix(self, store: KVStore) -> None:
        hashes, blocks = chain(b"a", 6)
        store.save(hashes[:2] + hashes[3:], blocks[:2] + blocks[3:], "doc")
        assert store.prefix_length(hashes) == 2
        assert store.load(hashes, empty(6)) == 2

    def test_saving_again_keeps_the_first_bytes(self, store: KVStore) -> None:
        hashes, blocks = chain(b"a", 4)
        store.save(hashes, blocks, "doc")
        store.save(hashes, [memoryview(bytes(BLOCK_BYTES))] * 4, "doc")
        into = empty(4)
        assert store.load(hashes, into) == 4
        assert [bytes(view) for view in into] == [bytes(view) for view in blocks]
        assert [entry.blocks for entry in store.entries()] == [4]

    def test_other_salts_share_nothing(self, store: KVStore) -> None:
        hashes, blocks = chain(b"tenant-a", 4)
        store.save(hashes, blocks, "doc")
        assert store.prefix_length(chain(b"tenant-b", 4)[0]) == 0

    def test_forget_spares_what_others_own(self, store: KVStore) -> None:
        hashes, blocks = chain(b"a", 8)
        store.save(hashes, blocks, "one")
        store.save(hashes[:3], blocks[:3], "two")
        assert store.forget("one") == 5 * BLOCK_BYTES
        assert store.prefix_length(hashes) == 3
        into = empty(8)
        assert store.load(hashes, into) == 3
        assert [bytes(view) for view in into[:3]] == [bytes(view) for view in blocks[:3]]
        assert store.forget("two") == 3 * BLOCK_BYTES
        assert store.prefix_length(hashes) == 0
        assert store.entries() == []

    def test_forgetting_a_stranger_frees_nothing(self, store: KVStore) -> None:
        assert store.forget("nobody") == 0

    def test_a_forgotten_owner_can_come_back(self, store: KVStore) -> None:
        hashes, blocks = chain(b"a", 3)
        store.save(hashes, blocks, "doc")
        store.forget("doc")
        store.save(hashes, blocks, "doc")
        assert store.load(hashes, empty(3)) == 3

    def test_entries_count_each_owner(self, store: KVStore) -> None:
        hashes, blocks = chain(b"a", 5)
        store.save(hashes, blocks, "one")
        store.save(hashes[:2], blocks[:2], "two")
        listed = {entry.owner: (entry.blocks, entry.size_bytes) for entry in store.entries()}
        assert listed == {"one": (5, 5 * BLOCK_BYTES), "two": (2, 2 * BLOCK_BYTES)}
        assert all(entry.last_used_at > 0 for entry in store.entries())

    def test_threads_save_load_and_forget_at_once(self, store: KVStore) -> None:
        faults: list[str] = []

        def work(name: str) -> None:
            hashes, blocks = chain(name.encode(), 20)
            for _ in range(5):
                store.save(hashes, blocks, name)
                into = empty(20)
                count = store.load(hashes, into)
                if count != 20 or [bytes(v) for v in into] != [bytes(v) for v in blocks]:
                    faults.append(f"{name}: {count}")
                store.forget(name)

        threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults
        assert store.entries() == []
