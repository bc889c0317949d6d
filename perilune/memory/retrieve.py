"""Finds entries: asks both arms of the index, rescores what they propose from SQL, and orders it.

Knows SQL, the index and the embedder as seams; not files, prompts or HTTP. Every way in which something is missing
leaves a search that works and says so: no embedder, no vectors yet: words alone; no index: a scan of every entry in
scope; low confidence: the same scan; a cross-encoder that is late: the order of the first stage. What SQL no longer
holds is never found, whatever the index says.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np
import sqlalchemy as sa

from perilune.memory import entries, scoring
from perilune.memory.analyse import Analyser
from perilune.memory.asked import Kind, read
from perilune.memory.confidence import ABSTAIN_BELOW, BEST, FITTED_MODEL, Ranking, confidence, signs_of
from perilune.memory.confidence import Signs as Trust
from perilune.memory.embed.protocol import Embedder, EmbedderUnavailable
from perilune.memory.entries import Entry, Text
from perilune.memory.gather import Gatherer, Member, narrowed
from perilune.memory.indexer import decode
from perilune.memory.language import detect
from perilune.memory.locality import Locality
from perilune.memory.model_server import NoAnswer
from perilune.memory.postings import term_hash
from perilune.memory.rank import WEIGHTS, Numbers, Signs, fuse, order_of
from perilune.memory.rerank import Reranker
from perilune.memory.resident import Resident
from perilune.memory.scope import Scope
from perilune.memory.store import Store
from perilune.memory.synonyms import Synonyms
from perilune.memory.timespan import Span, covered, spans
from perilune.memory.vectors.protocol import IndexUnavailable, Terms, Vector, VectorIndex

CANDIDATES = 100
"""Proposals asked of each arm."""

MAX_INDEX_TERMS = 32
"""The rarest terms of a long question go to the index; all of them are scored."""

MAX_QUERY_CHARS = 4_000
"""A longer question is searched by its first and last half of this: what is asked stands there, and all of a pasted
document would find only itself, slowly."""

LOW_CONFIDENCE = 0.25
MAX_SCAN = 5_000
"""Low confidence leads to a scan up to this many entries in scope; beyond, it would cost more than it is worth."""

Proposer = VectorIndex | Resident
Proposals = list[Future[list[int]]]
"""Searches of one arm that run."""

_NAME = re.compile(r"[^\W\d_]+")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hit:
    """A found entry. `text[start:end]` of a file's whole text is `text`; turns have no such range. `at` is when it
    was said; `happened_s`, in a set of evidence, when what it tells happened (both seconds since the epoch)."""

    entry_id: int
    source_id: str
    number: int
    text: str
    page: int | None
    start: int | None
    end: int | None
    speaker: str | None
    at: float | None
    score: float
    happened_s: float | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Hits, best first. `confidence` is the chance that one of the best five holds what was asked, told from
    `signs` (`confidence.py`).

    Where the best hits can't answer (`kind` is no lookup), `evidence` is the set of entries that the question
    needs, in the order in which things happened. `missing` says which part of the search was out of use, in words
    for people; `scanned` that every entry was read; `measured` that `confidence` is a measured chance: question
    and hits have vectors of the model that it was fitted with.
    """

    hits: tuple[Hit, ...]
    confidence: float
    missing: tuple[str, ...] = ()
    scanned: bool = False
    kind: Kind = Kind.LOOKUP
    evidence: tuple[Hit, ...] = ()
    signs: Trust = field(default_factory=Trust)
    measured: bool = False

    @property
    def doubtful(self) -> bool:
        """Whether the sources don't hold what was asked, as far as can be told. Only a lookup can be."""
        return self.kind is Kind.LOOKUP and self.measured and self.confidence < ABSTAIN_BELOW


@dataclass(frozen=True, slots=True)
class _Question:
    """A question, taken apart."""

    text: str
    weights: Mapping[int, float]  # term -> synonym weight x idf, for terms that occur
    mean_length: float
    vector: Vector | None
    named: list[Span]
    own: Mapping[int, float]  # its own terms -> idf, also those that no entry holds
    unknown: float  # share of its own terms that no entry holds


class Retriever:
    """Thread-safe. Without `index` a search reads all entries in scope; without `embedder`, words alone count.
    `resident` proposes instead of the index whenever it is ready; `reranker` reads the best hits once more."""

    def __init__(
        self,
        store: Store,
        index: VectorIndex | None = None,
        embedder: Embedder | None = None,
        synonyms: Synonyms | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        index_failed: Callable[[], None] = lambda: None,
        locality: Locality | None = None,
        resident: Resident | None = None,
        reranker: Reranker | None = None,
    ) -> None:
        self._store = store
        self._index = index
        self._resident = resident
        self._reranker = reranker
        self._embedder = embedder
        self._synonyms = synonyms or Synonyms.none()
        self.gatherer = Gatherer(store, embedder, self._synonyms, locality)
        self._clock = clock
        self._index_failed = index_failed
        self._locality = locality or Locality(store)
        self._pool = ThreadPoolExecutor(4, "retrieve")
        self._analysers = threading.local()

    def close(self) -> None:
        self._pool.shutdown()
        if self._resident is not None:
            self._resident.close()
        if self._reranker is not None:
            self._reranker.close()

    def search(self, query: str, scope: Scope, limit: int, now: datetime | None = None) -> Found:
        """The best `limit` entries in scope. `now` is when the question was asked (default: the clock)."""
        query, missing = _clipped(query), list[str]()
        embedding = self._begin_embedding(query, scope.tenant, missing)
        expanded = self._synonyms.expand(query, self._analyser())
        terms = {term_hash(term): weight for term, weight in expanded.items()}
        with self._store.read() as connection:
            known = entries.statistics(connection, scope.tenant, terms)
        if known.entries == 0 or limit <= 0:
            return Found((), 0.0)
        now = now or self._clock()
        asked = read(query)
        evidence = self._evidence(self.gatherer.gather(asked, query, scope, now, self._analyser(), missing))
        question = _Question(
            query,
            _weighed(terms, known),
            known.mean_length,
            None,
            spans(query, now),
            *_own(terms, known),
        )
        proposer = self._proposer(scope.tenant, known.entries)
        words = self._ask_words(proposer, question, scope)  # runs while the question is embedded
        question = replace(question, vector=self._vector(embedding, missing))
        pool, scanned = self._candidates(proposer, question, scope, words, missing), False
        if pool is None:
            pool, scanned = self._scan(question, scope), True
        depth = max(limit, self._reranker.most) if self._reranker else limit
        ranked = self._rank(pool, question, depth)
        if not scanned and ranked.confidence < LOW_CONFIDENCE and self._is_small(scope, known.entries):
            ranked, scanned = self._rank(self._scan(question, scope), question, depth), True
        hits, sure = self._reranked(ranked.hits, query, scope.tenant, missing)[:limit], ranked.confidence
        told = tuple(dict.fromkeys(missing))
        return Found(hits, sure, told, scanned, asked.kind, evidence, ranked.signs, ranked.measured)

    # ----------------------------------------------------------------------------------------------- the question

    def _analyser(self) -> Analyser:
        """This thread's own."""
        found: Analyser | None = getattr(self._analysers, "analyser", None)
        if found is None:
            found = self._analysers.analyser = Analyser()
        return found

    def _begin_embedding(self, query: str, tenant: str, missing: list[str]) -> Future[Vector] | None:
        """Embed beside the reading of statistics; None where none understands the question or may have it."""
        if self._embedder is None:
            return None
        if self._embedder.remote and not self._locality.may_ask(tenant):
            missing.append(
                "The embedder is on another machine, and what is searched stays on this one: by words only."
            )
            return None
        languages = self._embedder.languages
        if languages is not None and detect(query) not in languages:
            return None
        return self._pool.submit(self._embedder.embed, [query], "query")

    @staticmethod
    def _vector(embedding: Future[Vector] | None, missing: list[str]) -> Vector | None:
        if embedding is None:
            return None
        try:
            found: Vector = embedding.result()[0]
        except EmbedderUnavailable as error:
            missing.append(error.message)
            return None
        return found

    # ----------------------------------------------------------------------------------------------- candidates

    def _proposer(self, tenant: str, total: int) -> Proposer | None:
        """Who is asked for candidates; the tenant has `total` entries."""
        return self._resident if self._resident and self._resident.ready(tenant, total) else self._index

    def _ask_words(self, proposer: Proposer | None, question: _Question, scope: Scope) -> Proposals:
        """Begin the word arm's searches."""
        if proposer is None or not question.weights:
            return []
        rarest = sorted(question.weights.items(), key=lambda item: -item[1])[:MAX_INDEX_TERMS]
        asked = Terms(dict(rarest), question.mean_length)
        return [self._pool.submit(proposer.words, asked, CANDIDATES, each) for each in _scopes(question, scope)]

    def _candidates(
        self, proposer: Proposer | None, question: _Question, scope: Scope, words: Proposals, missing: list[str]
    ) -> list[Entry] | None:
        """What is proposed, with both neighbours; None where nobody can be asked."""
        if proposer is None:
            return None
        near: Proposals = []
        if question.vector is not None:
            vector, nearest = question.vector, proposer.nearest
            near = [self._pool.submit(nearest, vector, CANDIDATES, each) for each in _scopes(question, scope)]
        proposed, found = set[int](), dict[int, Entry]()
        try:
            for calls in (words, near):  # what the words propose is read while the other arm searches
                ids = {entry_id for call in calls for entry_id in call.result()} - proposed
                proposed |= ids
                with self._store.read() as connection:
                    found |= {entry.id: entry for entry in self._with_neighbours(connection, scope.tenant, ids)}
        except IndexUnavailable as error:
            missing.append(error.message)
            self._index_failed()
            return None
        return list(found.values())

    def _with_neighbours(self, connection: sa.Connection, tenant: str, ids: set[int]) -> list[Entry]:
        """The entries and those one place before and after. What was stored together has ids in a row, so most
        neighbours come with the same query; only the others are looked up by place, which takes longer."""
        around = ids | {entry_id + step for entry_id in ids for step in (-1, 1)}
        loaded = entries.load(connection, tenant, around, self._model)
        proposed = {(entry.source_id, entry.number) for entry in loaded if entry.id in ids}
        wanted = {(source, number + step) for source, number in proposed for step in (-1, 0, 1)}
        found = [entry for entry in loaded if (entry.source_id, entry.number) in wanted]
        missing = wanted - {(entry.source_id, entry.number) for entry in found}
        places = {place for place in missing if place[1] >= 0}
        return found + entries.load_places(connection, tenant, places, self._model)

    @property
    def _model(self) -> str:
        return self._embedder.model if self._embedder else ""

    def _is_small(self, scope: Scope, total: int) -> bool:
        """Whether reading every entry in scope is worth a doubtful answer; the tenant has `total`."""
        if scope.sources is None or total <= MAX_SCAN:
            return total <= MAX_SCAN
        with self._store.read() as connection:
            return entries.count(connection, scope, MAX_SCAN) <= MAX_SCAN

    def _scan(self, question: _Question, scope: Scope) -> list[Entry]:
        """The best of every entry in scope, by words and by vector, without an index."""
        kept: list[tuple[float, float, Entry]] = []
        with self._store.read() as connection:
            for part in entries.scan(connection, scope, self._model):
                words, dense = _scores(part, question)
                kept += zip(words.tolist(), np.nan_to_num(dense, nan=-2.0).tolist(), part, strict=True)
                kept = _best_of(kept, question)
        return [entry for _, _, entry in kept]

    # -------------------------------------------------------------------------------------------------- ranking

    def _rank(self, pool: Sequence[Entry], question: _Question, limit: int) -> _Ranked:
        pool = [pool[at] for at in order_of(pool)]
        if not pool:
            return _Ranked((), Trust(unknown=1.0), 0.0, question.vector is not None)
        words, dense = _scores(pool, question)
        scores = fuse(pool, words, dense, _signs(pool, question), WEIGHTS)
        relevant = (words > 0) | (np.nan_to_num(dense, nan=-1.0) > 0)
        order = [int(at) for at in np.argsort(-scores, kind="stable") if relevant[at]]
        hits = self._texts([(pool[at], float(scores[at])) for at in order[: max(limit, BEST)]])
        ranking = Ranking(pool, words, dense, scores, order)
        best = [hit.text for hit in hits[:BEST]]
        signs = signs_of(question.text, question.own, question.unknown, question.named, ranking, best)
        measured = self._model == FITTED_MODEL and not np.isnan(dense[order[:BEST]]).any()
        return _Ranked(hits, signs, confidence(signs) if order else 0.0, measured)

    def _reranked(self, hits: tuple[Hit, ...], query: str, tenant: str, missing: list[str]) -> tuple[Hit, ...]:
        """The best hits in the cross-encoder's order, then the others. Scores stay those of the first stage, handed
        out anew, so that all hits are on one scale."""
        if self._reranker is None or len(hits) < 2:
            return hits
        if self._reranker.remote and not self._locality.may_ask(tenant):
            missing.append("The re-ranker is on another machine, and what is searched stays on this one.")
            return hits
        read = hits[: self._reranker.most]
        try:
            scores = self._reranker.scores(query, [hit.text for hit in read])
        except NoAnswer as why:
            missing.append(f"The re-ranker wasn't waited for: {why}.")
            return hits
        order = sorted(range(len(read)), key=lambda at: -scores[at])
        again = tuple(replace(read[at], score=hit.score) for at, hit in zip(order, read, strict=True))
        return again + hits[len(read) :]

    def _evidence(self, members: Sequence[Member]) -> tuple[Hit, ...]:
        """The set of a question that the best hits can't answer; its hits have no score."""
        happened = {member.entry.id: member.happened_s for member in members}
        hits = self._texts([(member.entry, 0.0) for member in members])
        return tuple(replace(hit, happened_s=happened[hit.entry_id]) for hit in hits)

    def _texts(self, best: Sequence[tuple[Entry, float]]) -> tuple[Hit, ...]:
        with self._store.read() as connection:
            said: dict[int, Text] = entries.texts(connection, [entry.id for entry, _ in best])
        return tuple(
            Hit(entry.id, entry.source_id, entry.number, *_place(said[entry.id]), entry.speaker, entry.at, score)
            for entry, score in best
            if entry.id in said
        )


@dataclass(frozen=True, slots=True)
class _Ranked:
    hits: tuple[Hit, ...]
    signs: Trust
    confidence: float
    measured: bool


def _place(text: Text) -> tuple[str, int | None, int | None, int | None]:
    return text.text, text.page, text.start, text.end


def _weighed(terms: Mapping[int, float], known: entries.Statistics) -> dict[int, float]:
    """Terms that occur, with the weight that BM25 gives them."""
    there = [term for term in terms if known.holders.get(term)]
    idf = scoring.inverse_frequency([known.holders[term] for term in there], known.entries)
    return {term: terms[term] * float(value) for term, value in zip(there, idf, strict=True)}


def _scores(part: Sequence[Entry], question: _Question) -> tuple[Numbers, Numbers]:
    """(BM25, cosine or NaN) of entries."""
    terms = list(question.weights)
    counts = scoring.frequencies([entry.terms for entry in part], terms)
    lengths = [entry.length for entry in part]
    words = scoring.bm25(counts, lengths, [question.weights[term] for term in terms], question.mean_length)
    dense = np.full(len(part), np.nan, np.float32)
    if question.vector is not None:
        width = len(question.vector)
        has = [at for at, entry in enumerate(part) if entry.vector is not None and len(entry.vector) == 2 * width]
        halves = [part[at].vector or b"" for at in has]
        dense[has] = decode(halves, width) @ question.vector
    return words, dense


def _best_of(kept: list[tuple[float, float, Entry]], question: _Question) -> list[tuple[float, float, Entry]]:
    """The best of a scan so far by either arm, with their neighbours, and those of the times that were named."""
    chosen = {entry.id for words, _, entry in sorted(kept, key=lambda each: -each[0])[:CANDIDATES] if words > 0}
    chosen |= {entry.id for _, dense, entry in sorted(kept, key=lambda each: -each[1])[:CANDIDATES] if dense > -1}
    if question.named:
        inside = [each for each in kept if covered(each[2].at, question.named)]
        chosen |= {entry.id for words, _, entry in sorted(inside, key=lambda each: -each[0])[:CANDIDATES] if words}
    places = {(entry.source_id, entry.number) for _, _, entry in kept if entry.id in chosen}
    near = {(source, number + step) for source, number in places for step in (-1, 0, 1)}
    return [each for each in kept if (each[2].source_id, each[2].number) in near]


def _signs(pool: Sequence[Entry], question: _Question) -> Signs:
    asked = {word.lower() for word in _NAME.findall(question.text)}
    return Signs(
        np.array([covered(entry.at, question.named) for entry in pool], np.float32),
        np.array([_names(entry.speaker, question.text, asked) for entry in pool], np.float32),
    )


def _names(speaker: str | None, question: str, words: Iterable[str]) -> bool:
    """Whether the question names the speaker: as a word where words have borders, else anywhere in it."""
    if not speaker:
        return False
    return speaker.lower() in words if speaker.isascii() and " " not in speaker else speaker in question


def _scopes(question: _Question, scope: Scope) -> list[Scope]:
    """The scope, and its parts in the times that the question names."""
    return [scope, *(narrowed(scope, span) for span in question.named)]


def _own(terms: Mapping[int, float], known: entries.Statistics) -> tuple[dict[int, float], float]:
    """The question's own terms (not their synonyms) with their idf, and the share of them that occurs nowhere."""
    own = [term for term, weight in terms.items() if weight == 1.0]
    if not own:
        return {}, 1.0
    holders = [known.holders.get(term, 0) for term in own]
    idf = scoring.inverse_frequency(holders, known.entries)
    return dict(zip(own, idf.tolist(), strict=True)), holders.count(0) / len(own)


def _clipped(query: str) -> str:
    """The beginning and the end of what is too long."""
    half = MAX_QUERY_CHARS // 2
    return query if len(query) <= MAX_QUERY_CHARS else f"{query[:half]}\n{query[-half:]}"
