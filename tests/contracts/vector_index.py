"""What every `VectorIndex` must do. Subclass in a test module and give `index`.

class TestLance(VectorIndexContract):
    @pytest.fixture
    def index(self, tmp_path): ...
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import pytest

from perilune.memory import scoring
from perilune.memory.scope import Scope
from perilune.memory.vectors.protocol import Row, Size, Terms, Vector, VectorIndex

WIDTH = 16
MODEL = "test-model"
ALL = Scope("acme")


def vectors(count: int, seed: int = 0) -> Vector:
    found = np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)
    normal: Vector = found / np.linalg.norm(found, axis=1, keepdims=True)
    return normal


def weights(**terms: float) -> Terms:
    """Terms named a..z, hashed like the real ones: over all 64 bits."""
    return Terms({term(name): weight for name, weight in terms.items()}, 10.0)


def term(name: str) -> int:
    return (ord(name) * 0x9E3779B97F4A7C15) % 2**64


def put(index: VectorIndex, rows: list[Row], held: list[Mapping[str, int]] | None = None, seed: int = 0) -> None:
    texts = held or [{"a": 1}] * len(rows)
    index.put_texts(rows, [{term(name): count for name, count in each.items()} for each in texts])
    index.put_vectors(rows, vectors(len(rows), seed))


class VectorIndexContract:
    @pytest.fixture
    def index(self) -> VectorIndex:
        raise NotImplementedError

    def test_an_empty_index_finds_nothing(self, index: VectorIndex) -> None:
        assert index.words(weights(a=1), 5, ALL) == []
        assert index.nearest(vectors(1)[0], 5, ALL) == []
        assert index.size() == Size(0, 0)
        index.maintain()

    def test_rows_are_found_as_soon_as_they_are_put(self, index: VectorIndex) -> None:
        for number in range(3):
            put(index, [Row(number + 1, "acme", "s", number)], [{"abc"[number]: 1}], seed=number)
            assert index.words(weights(**{"abc"[number]: 1.0}), 5, ALL) == [number + 1]
            assert index.nearest(vectors(1, number)[0], 1, ALL) == [number + 1]
        assert index.size() == Size(3, 3)

    def test_words_come_without_vectors(self, index: VectorIndex) -> None:
        index.put_texts([Row(7, "acme", "s", 0)], [{term("a"): 2}])
        assert index.words(weights(a=1), 5, ALL) == [7]
        assert index.nearest(vectors(1)[0], 5, ALL) == []
        assert index.size() == Size(1, 0)

    def test_more_and_rarer_terms_come_first(self, index: VectorIndex) -> None:
        rows = [Row(number, "acme", "s", number) for number in range(40)]
        held: list[Mapping[str, int]] = [{"a": 1, "z": 9} for _ in rows]
        held[11] = {"a": 3, "b": 2, "z": 5}
        held[12] = {"a": 1, "b": 1, "z": 8}
        put(index, rows, held)
        found = index.words(weights(a=0.1, b=3.0), 40, ALL)
        assert found[:2] == [11, 12]
        assert len(found) == 40
        assert index.words(weights(q=1), 40, ALL) == []
        assert index.words(Terms({}, 1.0), 40, ALL) == []

    def test_nearest_is_by_cosine(self, index: VectorIndex) -> None:
        rows = [Row(number, "acme", "s", number) for number in range(200)]
        put(index, rows)
        known = vectors(200)
        for at in (0, 57, 199):
            exact = np.argsort(-known @ known[at], kind="stable")[:10].tolist()
            assert index.nearest(known[at], 10, ALL) == exact

    def test_tenants_never_meet(self, index: VectorIndex) -> None:
        put(index, [Row(1, "acme", "s", 0), Row(2, "other", "s", 0), Row(3, "o'; DROP --", "s", 0)])
        for tenant, own in (("acme", 1), ("other", 2), ("o'; DROP --", 3)):
            assert index.words(weights(a=1), 9, Scope(tenant)) == [own]
            assert index.nearest(vectors(1)[0], 9, Scope(tenant)) == [own]
        assert index.words(weights(a=1), 9, Scope("x' OR '1'='1")) == []

    @pytest.mark.parametrize(
        ("scope", "ids"),
        [
            (Scope("acme", sources=("s1",)), {1, 2}),
            (Scope("acme", sources=()), set()),
            (Scope("acme", speakers=("Ann O'Hara", "Bo")), {1, 2}),
            (Scope("acme", since_s=150.0), {2, 3}),
            (Scope("acme", since_s=100.0, until_s=200.0), {1, 2}),
            (Scope("acme", numbers=(1, 5)), {2, 4}),
            (Scope("acme", pages=(3, 4)), {3, 4}),
            (Scope("acme", entities=("eve's garden", "nobody")), {1, 4}),
            (Scope("acme", sources=("s1", "s2"), speakers=("Bo",), since_s=0, entities=("x",)), {2}),
        ],
    )
    def test_filters(self, index: VectorIndex, scope: Scope, ids: set[int]) -> None:
        rows = [
            Row(1, "acme", "s1", 0, None, 100.0, "Ann O'Hara", ("eve's garden",)),
            Row(2, "acme", "s1", 1, None, 200.0, "Bo", ("x", "y")),
            Row(3, "acme", "s2", 0, 3, 300.0, None, ()),
            Row(4, "acme", "s2", 5, 4, None, None, ("z", "eve's garden")),
        ]
        put(index, rows)
        assert set(index.words(weights(a=1), 9, scope)) == ids
        assert set(index.nearest(vectors(1)[0], 9, scope)) == ids

    def test_what_is_removed_is_gone(self, index: VectorIndex) -> None:
        put(index, [Row(number, "acme", "s", number) for number in range(20)])
        index.maintain()
        index.remove([3, 4, 999])
        assert {3, 4}.isdisjoint(index.words(weights(a=1), 99, ALL))
        assert {3, 4}.isdisjoint(index.nearest(vectors(4)[3], 99, ALL))
        assert index.size() == Size(18, 18)
        index.remove([])
        assert index.size() == Size(18, 18)

    def test_what_is_put_twice_is_there_once(self, index: VectorIndex) -> None:
        rows = [Row(number, "acme", "s", number) for number in range(5)]
        put(index, rows)
        put(index, [*rows, Row(5, "acme", "s", 5)])
        assert index.size() == Size(6, 6)
        assert sorted(index.words(weights(a=1), 99, ALL)) == list(range(6))

    def test_clear_empties_and_the_index_is_usable_again(self, index: VectorIndex) -> None:
        put(index, [Row(1, "acme", "s", 0)])
        index.clear()
        assert index.size() == Size(0, 0)
        put(index, [Row(2, "acme", "s", 0)])
        assert index.words(weights(a=1), 9, ALL) == [2]

    def test_maintenance_changes_no_answer(self, index: VectorIndex) -> None:
        rows = [Row(number, "acme", "s", number) for number in range(60)]
        for at in range(0, 60, 10):
            put(index, rows[at : at + 10], seed=at)
        before = index.nearest(vectors(1)[0], 60, ALL), set(index.words(weights(a=1), 60, ALL))
        index.maintain()
        assert (index.nearest(vectors(1)[0], 60, ALL), set(index.words(weights(a=1), 60, ALL))) == before

    def test_writers_and_readers_side_by_side(self, index: VectorIndex) -> None:
        faults: list[BaseException] = []

        def run(base: int) -> None:
            try:
                for number in range(5):
                    put(index, [Row(base + number, "acme", f"s{base}", number)])
                    assert base + number in index.words(weights(a=1), 99, ALL)
            except BaseException as error:
                faults.append(error)

        threads = [threading.Thread(target=run, args=(100 * n,)) for n in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert faults == []
        assert index.size() == Size(15, 15)

    def test_the_best_by_our_bm25_are_proposed(self, index: VectorIndex) -> None:
        """Rescored with our BM25, the proposals hold what a look at every row finds (overlap@10 >= 0.95)."""
        rng = np.random.default_rng(5)
        names = [chr(ord("a") + each) for each in range(26)]
        share = 1 / np.arange(1, 27)
        held: list[Mapping[str, int]] = []
        for _ in range(1_500):
            drawn = rng.choice(26, size=int(rng.integers(5, 60)), p=share / share.sum())
            held.append(
                {names[each]: int(count) for each, count in zip(*np.unique(drawn, return_counts=True), strict=True)}
            )
        put(index, [Row(number, "acme", "s", number) for number in range(len(held))], held)
        counts = np.array([[each.get(name, 0) for name in names] for each in held], np.float32)
        lengths = counts.sum(axis=1)
        idf = scoring.inverse_frequency((counts > 0).sum(axis=0), len(held))
        overlaps = []
        for _ in range(40):
            asked = rng.choice(26, size=int(rng.integers(2, 7)), replace=False)
            mask = np.isin(np.arange(26), asked)
            scores = scoring.bm25(counts[:, mask], lengths, idf[mask], float(lengths.mean()))
            terms = Terms({term(names[at]): float(idf[at]) for at in asked}, float(lengths.mean()))
            proposed = index.words(terms, 100, ALL)
            ours = sorted(proposed, key=lambda at: -scores[at])[:10]
            tenth = np.sort(scores)[-10]
            overlaps.append(sum(scores[at] >= tenth - 1e-5 for at in ours) / 10)
        assert np.mean(overlaps) >= 0.95
