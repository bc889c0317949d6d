"""The set of entries that a question about order, a count or a whole needs: every entry in scope is read for it.

Knows SQL, the embedder and the question's events (`asked`); not files, prompts or HTTP. The best few hits can't
answer such questions: three events stand in three places, and what happened nine times was told nine times. Each
event is looked for by itself, by words, by meaning and by how it is told (`telling`): as done, not as a plan. Where
several entries belong, a learned chance of belonging says where the set ends, not a number of hits. What is learned
(`EVENT_WEIGHTS`, `SET_WEIGHTS`) was fitted by `python -m bench.memory_fit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np
import numpy.typing as npt

from perilune.memory import entries, scoring, telling
from perilune.memory.analyse import Analyser
from perilune.memory.asked import Asked, Bound, Kind, Side
from perilune.memory.embed.protocol import Embedder, EmbedderUnavailable
from perilune.memory.entries import Entry
from perilune.memory.indexer import decode
from perilune.memory.language import detect
from perilune.memory.locality import Locality
from perilune.memory.postings import term_hash
from perilune.memory.rank import Numbers, standard
from perilune.memory.scope import Scope
from perilune.memory.store import Store
from perilune.memory.synonyms import Synonyms
from perilune.memory.timespan import Span, covered, event_time, spans
from perilune.memory.vectors.protocol import Vector

MAX_READ = 100_000
"""More entries in scope aren't read for one question; the search then says that it looked at the best hits only."""

MAX_SET = 64
WORDS_WEIGHT = 15.0
"""What it counts that an entry holds all of an event's words, against one standard deviation of nearness."""

EVENT_WEIGHTS = (1.144, 8.82, -0.226, 0.617, -0.949, -0.122)
"""Of the one entry that tells an event: nearness as a z-score, the share of words held (at most 1), and how it is
told (`telling.signs`). Fitted by `python -m bench.memory_fit`."""

TOLD = 40
"""Entries of an event whose text is read for that."""

SET_BIAS = -4.932
SET_WEIGHTS = (0.731, 0.624)
"""Of the chance of belonging: nearness and nearness to the best three, both as z-scores. The share of words held
was fitted to nothing once both were there."""

_NOT_READ = -1e6
_SAME_COSINE = 0.95
_SAME_S = 86_400.0
_BEST = 3
_WORDS_SHARE = 0.6
_MOST_WORDS = 0.3
_FULL_BM25 = scoring.K1 + 1
_TINY = 1e-6

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Looked:
    """Every entry in scope, by source and number, beside every event: `words` (events, entries) is the share of an
    event's words that an entry holds (0 to 1), `near` its cosine as z-scores (0 without vectors)."""

    pool: list[Entry]
    words: Matrix
    near: Matrix
    vectors: Matrix  # (entries, width); zeros where an entry has none

    def scores(self, event: int) -> Numbers:
        found: Numbers = WORDS_WEIGHT * self.words[event] + self.near[event]
        return found

    def event_signs(self, event: int, how: Matrix) -> Matrix:
        """(entries, 2 + what `how` has): what it is told from that an entry tells an event."""
        found: Matrix = np.c_[self.near[event], np.minimum(self.words[event], 1), how].astype(np.float32)
        return found

    def signs(self, event: int) -> Matrix:
        """(entries, 2): what the chance of belonging to a set is told from."""
        best = np.argsort(-self.scores(event), kind="stable")[:_BEST]
        alike = standard((self.vectors @ self.vectors[best].sum(axis=0)).astype(np.float32))
        return np.stack([self.near[event], alike], axis=1)


@dataclass(frozen=True, slots=True)
class Member:
    """An entry of the set and when what it tells happened, in seconds since the epoch."""

    entry: Entry
    happened_s: float | None


class Gatherer:
    """Thread-safe, without state of its own."""

    def __init__(
        self, store: Store, embedder: Embedder | None, synonyms: Synonyms, locality: Locality | None = None
    ) -> None:
        self._store = store
        self._locality = locality or Locality(store)
        self._embedder = embedder
        self._synonyms = synonyms

    def gather(
        self, asked: Asked, query: str, scope: Scope, now: datetime, analyser: Analyser, missing: list[str]
    ) -> list[Member]:
        """The set, in the order in which things happened; empty for a lookup, and where too much is in scope."""
        if asked.kind is Kind.LOOKUP:
            return []
        if asked.kind is Kind.ORDER:
            looked = self.look(asked.events, scope, analyser, missing)
            chosen = one_each(self.told(looked, range(len(asked.events))))
        else:
            looked, ends, inside = self.bounded(asked, query, scope, now, analyser, missing)
            chosen = [*ends, *(belonging(looked, 0, inside) if asked.events else _spread(inside))]
        return self._in_time([looked.pool[at] for at in _distinct(looked, chosen)])

    def bounded(
        self, asked: Asked, query: str, scope: Scope, now: datetime, analyser: Analyser, missing: list[str]
    ) -> tuple[Looked, list[int], npt.NDArray[np.bool_]]:
        """For a count or a whole: every entry beside the thing that is asked for and the events that bound its
        time; the entries that tell those; and which others lie in that time."""
        named = spans(query, now)
        if len(named) == 1:
            scope = narrowed(scope, named[0])
        looked = self.look([*asked.events, *(bound.event for bound in asked.bounds)], scope, analyser, missing)
        first = len(asked.events)
        ends = one_each(self.told(looked, range(first, first + len(asked.bounds))))
        return looked, ends, self._inside(looked, asked.bounds, ends, named)

    def look(self, events: Sequence[str], scope: Scope, analyser: Analyser, missing: list[str]) -> Looked:
        """Hold every entry in scope against every event; none where there are too many."""
        with self._store.read() as connection:
            if entries.count(connection, scope, MAX_READ) > MAX_READ:
                missing.append(f"More than {MAX_READ:,} entries are in scope: only the best hits were looked at.")
                nothing = np.zeros((len(events), 0), np.float32)
                return Looked([], nothing, nothing, np.zeros((0, 1), np.float32))
        vectors = self._vectors(events, scope.tenant, missing)
        wanted = [self._synonyms.expand(event, analyser) for event in events]
        terms = [{term_hash(term): weight for term, weight in each.items()} for each in wanted]
        with self._store.read() as connection:
            known = entries.statistics(connection, scope.tenant, {term for each in terms for term in each})
            parts = list(entries.scan(connection, scope, self._embedder.model if self._embedder else ""))
        pool = sorted(
            (entry for part in parts for entry in part), key=lambda entry: (entry.source_id, entry.number)
        )
        words = np.zeros((len(events), len(pool)), np.float32)
        for at, each in enumerate(terms):
            words[at] = _held(pool, each, known)
        held = _matrix(pool, vectors.shape[1] if vectors is not None else 1)
        near = np.zeros_like(words)
        if vectors is not None and len(pool):
            has = np.abs(held).sum(axis=1) > 0
            cosines = np.where(has, vectors @ held.T, np.nan)
            near = np.stack([standard(row.astype(np.float32)) for row in cosines]) if len(events) else near
        return Looked(pool, words, near, held)

    def told(self, looked: Looked, events: Sequence[int]) -> dict[int, Numbers]:
        """How well each entry tells each of these events; of the best, by how they tell it."""
        best = {event: np.argsort(-looked.scores(event), kind="stable")[:TOLD] for event in events}
        places = sorted({int(at) for candidates in best.values() for at in candidates})
        with self._store.read() as connection:
            said = entries.texts(connection, [looked.pool[at].id for at in places])
        how = np.zeros((len(looked.pool), telling.SIGNS), np.float32)
        for at in places:
            if (text := said.get(looked.pool[at].id)) is not None:
                how[at] = telling.signs(text.text)
        found = {}
        for event, candidates in best.items():
            scores = np.full(len(looked.pool), _NOT_READ, np.float32)
            scores[candidates] = looked.event_signs(event, how)[candidates] @ np.array(EVENT_WEIGHTS, np.float32)
            found[event] = scores
        return found

    def _vectors(self, events: Sequence[str], tenant: str, missing: list[str]) -> Vector | None:
        """(events, width); None where no embedder is there or understands them, or may have them."""
        if self._embedder is None or not events:
            return None
        if self._embedder.remote and not self._locality.may_ask(tenant):
            return None
        languages = self._embedder.languages
        if languages is not None and detect(" ".join(events)) not in languages:
            return None
        try:
            return self._embedder.embed(list(events), "query")
        except EmbedderUnavailable as error:
            missing.append(error.message)
            return None

    def _inside(
        self, looked: Looked, bounds: Sequence[Bound], ends: Sequence[int], named: list[Span]
    ) -> npt.NDArray[np.bool_]:
        """Which entries lie in the time in question."""
        inside = np.ones(len(looked.pool), bool)
        if named:
            inside &= np.array([covered(entry.at, named) for entry in looked.pool], bool)
        times = np.array([np.nan if entry.at is None else entry.at for entry in looked.pool])
        for bound, member in zip(bounds, self._dated([looked.pool[at] for at in ends]), strict=False):
            if member.happened_s is not None:
                before = times < member.happened_s
                inside &= np.isnan(times) | (before if bound.side is Side.BEFORE else ~before)
        inside[list(ends)] = False
        return inside

    def _dated(self, chosen: Sequence[Entry]) -> list[Member]:
        with self._store.read() as connection:
            said = entries.texts(connection, [entry.id for entry in chosen])
        return [
            Member(entry, event_time(said[entry.id].text, entry.at))
            for entry in chosen
            if entry.id in said  # deleted meanwhile
        ]

    def _in_time(self, chosen: Sequence[Entry]) -> list[Member]:
        def place(member: Member) -> tuple[bool, float, str, int]:
            happened = member.happened_s
            return happened is None, happened or 0.0, member.entry.source_id, member.entry.number

        return sorted(self._dated(chosen), key=place)


def one_each(scores: Mapping[int, Numbers]) -> list[int]:
    """The best entry for each event, in the events' order, none twice: the surest event chooses first."""
    ranked = {event: np.argsort(-mine, kind="stable") for event, mine in scores.items()}

    def lead(event: int) -> float:
        best = scores[event][ranked[event][:2]]
        return float(best[0] - best[-1]) if len(best) else 0.0

    taken: dict[int, int] = {}
    for event in sorted(scores, key=lead, reverse=True):
        free = next((int(at) for at in ranked[event] if int(at) not in taken.values()), None)
        if free is not None:
            taken[event] = free
    return [taken[event] for event in scores if event in taken]


def belonging(looked: Looked, event: int, inside: npt.NDArray[np.bool_]) -> list[int]:
    """The entries inside that belong to an event that happens often."""
    words = np.where(inside, looked.words[event], 0.0)
    enough = max(_WORDS_SHARE * float(words.max(initial=0.0)), _TINY)
    if not looked.near[event].any():  # no vectors: what holds about as many words as the best
        return [int(at) for at in np.argsort(-words, kind="stable")[:MAX_SET] if words[at] >= enough]
    z = looked.signs(event) @ np.array(SET_WEIGHTS, np.float32) + SET_BIAS
    chances = np.where(inside, 1 / (1 + np.exp(-z)), 0.0)
    chances[words >= max(enough, _MOST_WORDS)] = 1.0
    order = np.argsort(-chances, kind="stable")[:MAX_SET]
    return [int(at) for at in order[: best_size(chances[order])] if chances[at] > 0]


def best_size(chances: npt.NDArray[np.float64]) -> int:
    """How many of these, best first, to take, so that F1 is greatest as far as the chances tell: 2 × those right
    over those taken and those there are."""
    if not len(chances):
        return 0
    taken = np.arange(1, len(chances) + 1)
    return int(np.argmax(2 * np.cumsum(chances) / (taken + chances.sum()))) + 1


def narrowed(scope: Scope, span: Span) -> Scope:
    """The part of a scope in a time that the question names."""
    since = span.since_s if scope.since_s is None else max(scope.since_s, span.since_s)
    until = span.until_s if scope.until_s is None else min(scope.until_s, span.until_s)
    return replace(scope, since_s=since, until_s=until)


def _held(pool: Sequence[Entry], terms: dict[int, float], known: entries.Statistics) -> Numbers:
    """BM25 of entries over what holding all of the event's own words would give; a word that occurs nowhere counts
    as missing, so that one common word of an event isn't taken for the event."""
    hashes = list(terms)
    idf = scoring.inverse_frequency([known.holders.get(term, 0) for term in hashes], known.entries)
    weights = np.array([terms[term] for term in hashes], np.float32) * idf
    own = np.array([terms[term] == 1.0 for term in hashes])
    counts = scoring.frequencies([entry.terms for entry in pool], hashes)
    found = scoring.bm25(counts, [entry.length for entry in pool], weights, known.mean_length)
    whole = float(weights[own].sum()) if len(weights) else 0.0
    shares: Numbers = found / np.float32(_FULL_BM25 * max(whole, _TINY))
    return shares


def _matrix(pool: Sequence[Entry], width: int) -> Matrix:
    """Vectors of entries, zeros where there are none (yet)."""
    found = np.zeros((len(pool), width), np.float32)
    has = [at for at, entry in enumerate(pool) if entry.vector is not None and len(entry.vector) == 2 * width]
    if has:
        found[has] = decode([pool[at].vector or b"" for at in has], width)
    return found


def _spread(inside: npt.NDArray[np.bool_]) -> list[int]:
    """Where everything is asked for: entries at even distances."""
    places = np.flatnonzero(inside)
    if not len(places):
        return []
    steps = np.unique(np.linspace(0, len(places) - 1, min(MAX_SET, len(places))).astype(int))
    return [int(places[at]) for at in steps]


def _distinct(looked: Looked, chosen: Sequence[int]) -> list[int]:
    """Without entries that tell the same again within a day."""
    kept: list[int] = []
    for at in dict.fromkeys(chosen):
        entry = looked.pool[at]
        again = any(
            abs((entry.at or 0.0) - (looked.pool[other].at or 0.0)) <= _SAME_S
            and (
                entry.terms == looked.pool[other].terms
                or float(looked.vectors[at] @ looked.vectors[other]) >= _SAME_COSINE
            )
            for other in kept
        )
        if not again:
            kept.append(at)
    return kept
