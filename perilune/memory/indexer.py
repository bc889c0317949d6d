"""Brings the index up to date with SQL, in the background: words at once, vectors as fast as the embedder goes.

Knows what `index_work` says and in which order things must happen; a row of it goes only when the index has it, so
a kill costs at most a repetition. A failing index or embedder is tried again, less and less often; `state` says so.
Building, tidying and purging the index happen in a process of low priority (`upkeep`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from perilune.errors import PeriluneError
from perilune.memory import entries, passages
from perilune.memory.embed.protocol import Embedder
from perilune.memory.locality import Locality
from perilune.memory.store import Store
from perilune.memory.vectors.protocol import IndexUnavailable, Row, Vector, VectorIndex

TEXT_BATCH = 2_000
VECTOR_BATCH = 64
MAX_EMBEDDED_CHARS = 1_200
"""A vector speaks for this much of an entry's beginning; longer text would say less and take longer."""

UPKEEP_ROWS = 2_000
"""Rows written between two upkeeps."""

_IDLE_S = 5.0  # another process may have written
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IndexState:
    """Why an arm is out of use (empty: it works)."""

    words: str = ""
    vectors: str = ""


Upkeep = Callable[[Callable[[], bool], bool], bool]
"""Maintains the index elsewhere; given what tells it to stop, and whether to purge. Returns whether it was done."""


class Indexer:
    """Three threads: one for words and deletions, one for vectors, one that waits for upkeep.

    `upkeep` None: the index maintains itself.
    """

    def __init__(
        self,
        store: Store,
        index: VectorIndex,
        embedder: Embedder | None,
        upkeep: Upkeep | None = None,
        upkeep_rows: int = UPKEEP_ROWS,
        locality: Locality | None = None,
    ) -> None:
        self._store = store
        self._index = index
        self._embedder = embedder
        self._upkeep = upkeep
        self._upkeep_rows = upkeep_rows
        self._locality = locality or Locality(store)
        self._written = 0
        self._quiet = threading.Event()  # words has nothing to do: upkeep may begin
        self._writing = threading.Lock()  # between SQL and the index: what is settled is in the index
        self._suspect = True  # the folder may have been deleted, or the embedder changed, since the last run
        self._stop = threading.Event()
        arms = {"words": self.write_words, "upkeep": self.keep_up}
        if embedder is not None:
            arms["vectors"] = self.write_vectors
        self._faults = dict.fromkeys(arms, "")
        self._wake = {arm: threading.Event() for arm in arms}
        self._threads = [
            threading.Thread(target=self._run, args=item, name=f"index {item[0]}") for item in arms.items()
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def notify(self) -> None:
        """Something was stored or deleted."""
        for event in self._wake.values():
            event.set()

    def suspect(self) -> None:
        """A search could not use the index: look whether it holds what it should."""
        self._suspect = True
        self.notify()

    def stop(self) -> None:
        """Begin to stop. Whoever waits for an embedder goes on waiting until that is closed."""
        self._stop.set()
        self.notify()

    def close(self) -> None:
        """Stop; what is undone is taken up at the next start. Idempotent."""
        self.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    @property
    def state(self) -> IndexState:
        return IndexState(self._faults["words"], self._faults.get("vectors", ""))

    def drain(self, timeout_s: float = 60.0, *, purged: bool = False) -> bool:
        """Wait until the index knows everything, and with `purged` until nothing keeps what was deleted; false
        where that took too long."""
        self.notify()
        tasks: list[entries.Task] = ["gone", "text"]
        tasks += ["vector"] if self._embedder else []
        tasks += ["purge"] if purged else []
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            with self._store.read() as connection:
                if not any(entries.pending(connection, task, 1) for task in tasks):
                    return True
            time.sleep(0.01)
        return False

    def rebuild(self) -> None:
        """Empty the index and fill it again from SQL. Vectors that are stored aren't computed again."""
        with self._writing:  # else what is put now would be settled after everything was owed anew
            self._index.clear()
            with self._store.write() as connection:
                entries.owe_everything(connection)
        self.notify()

    # ---------------------------------------------------------------------------------------------- the threads

    def _run(self, arm: str, work: Callable[[], int]) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stop.is_set():
            self._wake[arm].clear()
            try:
                done = work()
            except Exception as error:
                if self._stop.is_set():  # what it waited for was closed
                    return
                self._failed(arm, error)
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            self._faults[arm], pause_s = "", _FIRST_PAUSE_S
            if done == 0:
                self._wake[arm].wait(_IDLE_S)

    def _failed(self, arm: str, error: Exception) -> None:
        """Say so once. A database that is busy or a full disk must not end the thread: all is tried again."""
        why = error.message if isinstance(error, PeriluneError) else f"Indexing failed ({type(error).__name__})."
        if self._faults[arm] != why:
            trace = None if isinstance(error, PeriluneError) else error
            _log.warning("indexing of %s waits: %s", arm, why, exc_info=trace)
        self._faults[arm] = why
        if isinstance(error, IndexUnavailable):
            self._repair()

    def _repair(self) -> None:
        """An index that can't be used is emptied and filled again: it holds nothing of its own."""
        self._suspect = True
        try:
            self.rebuild()
        except Exception as failed:  # a server that is away; tried again after the pause
            _log.info("the index can't be rebuilt yet: %s", failed)

    def write_words(self) -> int:
        """Forget what is gone, add what is new; returns how many entries that were."""
        with self._store.read() as connection:
            gone = entries.pending(connection, "gone", TEXT_BATCH)
            new = entries.pending(connection, "text", TEXT_BATCH)
            held = entries.rows_of(connection, new)
        with self._writing:
            if gone:
                self._index.remove(gone)
                self._settle("gone", gone)
            if new:
                self._index.put_texts([row for row, _ in held], [terms for _, terms in held])
                self._settle("text", new)
        done = len(gone) + len(new)
        if done == 0 and self._suspect:
            self._suspect = False
            done += self._complete_files()
            self._check()
        self._written += done
        if done:
            self._quiet.clear()
        else:
            self._quiet.set()
            self._wake["upkeep"].set()
        return done

    def _complete_files(self) -> int:
        """Make the entries of files that have none: of an earlier version of Perilune. Returns how many."""
        with self._store.read() as connection:
            files = passages.incomplete(connection)
        made = 0
        for file_id in files:
            with self._store.write() as connection:
                made += passages.add_new(connection, file_id)
        return made

    def _check(self) -> None:
        """Rebuild an index that holds fewer entries than SQL says it was given."""
        with self._store.read() as connection:
            texts, vectors = entries.indexed(connection)
            if self._embedder is not None and self._embedder.remote:
                vectors -= self._locality.without_vectors(connection, self._embedder.model)
        held = self._index.size()  # after SQL: what the other thread adds meanwhile isn't missed here
        if held.texts < texts or (self._embedder is not None and held.vectors < vectors):
            _log.warning("the index holds %s and should hold %d and %d; it is rebuilt", held, texts, vectors)
            self.rebuild()

    def write_vectors(self) -> int:
        """Embed what waits for it and put it into the index; returns how many entries that were."""
        assert self._embedder is not None
        model, width = self._embedder.model, self._embedder.width
        with self._store.read() as connection:
            ids = entries.pending(connection, "vector", VECTOR_BATCH)
            rows = [row for row, _ in entries.rows_of(connection, ids)]
            stored = entries.stored_vectors(connection, ids, model)
            # A server may give its model another width under the same name: those are made anew.
            known = {
                entry_id: half for entry_id, half in stored.items() if len(half) == width * entries.HALF.itemsize
            }
            missing = [row.id for row in rows if row.id not in known]
            if self._embedder.remote:
                kept = self._locality.kept_entries(connection, missing)
                missing = [entry_id for entry_id in missing if entry_id not in kept]
            texts = entries.texts(connection, missing)
        if missing:
            speakers = {row.id: row.speaker for row in rows}
            said = [embedded_text(texts[entry_id].text, speakers[entry_id]) for entry_id in missing]
            made = self._embedder.embed(said, "passage")
            with self._store.write() as connection:
                entries.store_vectors(connection, missing, model, made)
            halves = [vector.astype(entries.HALF).tobytes() for vector in made]
            known |= dict(zip(missing, halves, strict=True))
        with self._writing:
            # What stays on this machine has no vector; what is deleted from here on is still to be removed.
            rows = self._alive([row for row in rows if row.id in known])
            if rows:
                self._index.put_vectors(rows, decode([known[row.id] for row in rows], width))
            if ids:
                self._settle("vector", ids)
        return len(ids)

    def _alive(self, rows: Sequence[Row]) -> list[Row]:
        """Those that SQL still has: embedding takes seconds."""
        with self._store.read() as connection:
            alive = entries.existing(connection, [row.id for row in rows])
        return [row for row in rows if row.id in alive]

    def _settle(self, task: entries.Task, ids: Collection[int]) -> None:
        with self._store.write() as connection:
            entries.settle(connection, task, ids)

    def keep_up(self) -> int:
        """Run upkeep at a quiet moment, where much was written or something was deleted for good."""
        if not self._quiet.is_set():
            return 0
        with self._store.read() as connection:
            purges = entries.pending(connection, "purge", TEXT_BATCH)
            if entries.pending(connection, "gone", 1):
                return 0
        if not purges and self._written < self._upkeep_rows:
            return 0
        self._written = 0
        if self._upkeep is None:
            self._index.maintain(purge=bool(purges))
            done = True
        else:
            done = self._upkeep(self._stop.is_set, bool(purges))
        if purges and done and self._store.scrub():
            self._settle("purge", purges)
            return len(purges)
        return 0


def embedded_text(text: str, speaker: str | None) -> str:
    """What an entry's vector is made of: its beginning, with who says it."""
    clipped = text[:MAX_EMBEDDED_CHARS]
    return f"{speaker}: {clipped}" if speaker else clipped


def decode(halves: Sequence[bytes], width: int) -> Vector:
    """Stored vectors as (rows, width)."""
    stored = np.frombuffer(b"".join(halves), entries.HALF).reshape(len(halves), width)
    return stored.astype(np.float32)
