"""Rolling summaries of sessions and documents: sentences copied from them, in a tree that grows with its source.

Knows the tree and its tables; which sentences are worth it is `salience`. A leaf covers 16 entries, a node
above it 8 nodes. A node holds places (entry, characters) and no text: whoever reads it reads the source, so
that numbers, dates and names can't drift however often a summary is made of summaries, and nothing is left when
the source is deleted. A node is made once, from entries or from its children. The summary of a source is the
fewest nodes that cover it, and what lies behind the last whole leaf, read then and there. Sentences that a user
corrected are always part of it; the corrections stand in a table of their own, so no later round can lose them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import sqlalchemy as sa

from perilune.core import SummarySentence
from perilune.errors import InvalidRequest, NotFound
from perilune.memory import entries
from perilune.memory.analyse import Analyser
from perilune.memory.salience import Candidate, choose, cost_of, score, terms_of
from perilune.memory.schema import CORRECTIONS, ENTRIES, SUMMARIES, SUMMARY_WORK
from perilune.memory.scoring import inverse_frequency
from perilune.memory.sentences import MAX_SENTENCE_CHARS, sentences
from perilune.memory.store import Store

LEAF_ENTRIES = 16
FAN_OUT = 8
NODE_LETTERS = 900
"""What a node holds, in letters (`salience.cost_of`): some 225 tokens."""

_MOST_VALUES = 10_000  # SQLite binds 32,766 in one statement
_PLACE = np.dtype([("number", "<i4"), ("start", "<i4"), ("end", "<i4"), ("score", "<f4")])


@dataclass(frozen=True, slots=True)
class _Place:
    """A sentence of an entry: characters `start` to `end` of its text."""

    number: int
    start: int
    end: int
    score: float


@dataclass(frozen=True, slots=True)
class _Said:
    """An entry's text, who said it, and where it lies in a file (`page`, `offset`)."""

    text: str
    speaker: str | None
    page: int | None
    offset: int


class Summaries:
    """Thread-safe; calls block for milliseconds."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    # ------------------------------------------------------------------------------------------------- growing

    def advance(self) -> bool:
        """Make one leaf that is due, and the nodes above that it completes. False where nothing is due."""
        with self._store.read() as connection:
            whole = SUMMARY_WORK.c.entries - SUMMARY_WORK.c.done >= LEAF_ENTRIES
            work = connection.execute(sa.select(SUMMARY_WORK).where(whole).limit(1)).first()
            if work is None:
                return False
            source = _Source(connection, work.tenant, work.source_id)
            made = _grown(source, work.done)
        mine = (SUMMARY_WORK.c.tenant == work.tenant, SUMMARY_WORK.c.source_id == work.source_id)
        row = {"tenant": work.tenant, "source_id": work.source_id}
        with self._store.write() as connection:
            step = SUMMARY_WORK.update().where(*mine, SUMMARY_WORK.c.done == work.done)
            if connection.execute(step.values(done=work.done + LEAF_ENTRIES)).rowcount:  # else deleted meanwhile
                nodes = [
                    {**row, "level": level, "number": number, "sentences": _pack(places)}
                    for level, number, places in made
                ]
                connection.execute(SUMMARIES.insert(), nodes)
        return True

    # ------------------------------------------------------------------------------------------------- reading

    def read(self, tenant: str, source_id: str) -> list[SummarySentence]:
        """The whole summary up to the last entry, in order. Raises `NotFound`."""
        with self._store.read() as connection:
            source = _Source(connection, tenant, source_id)
            work = _work(connection, tenant, source_id)
            nodes = _cover(source, work.done)
            tail = _leaf(source, work.done, work.entries)
            return _shown(source, [*(place for node in nodes for place in node), *tail])

    def best_first(self, tenant: str, source_id: str) -> list[SummarySentence]:
        """What a small budget takes: corrections, the last in the text first, then the best of every node, then
        the second best.

        Changes only when a leaf is whole, so that a prompt keeps its beginning in between. Empty for a source that
        isn't there or has no whole leaf."""
        with self._store.read() as connection:
            query = sa.select(SUMMARY_WORK.c.done).where(*_of(SUMMARY_WORK, tenant, source_id))
            done = connection.execute(query).scalar()
            if not done:
                return []
            source = _Source(connection, tenant, source_id)
            ranked = [sorted(node, key=lambda place: -place.score) for node in _cover(source, done)]
            turns = zip_longest(*reversed(ranked))
            order = [place for row in turns for place in row if place is not None]
            shown = {(each.number, each.start): each for each in _shown(source, order)}
            keys = [source.key(place.number, place.start) for place in order]
        pinned = [key for key, each in shown.items() if each.corrected]
        first = sorted(pinned, reverse=True)
        return [shown[key] for key in dict.fromkeys([*first, *keys]) if key in shown]

    # ---------------------------------------------------------------------------------------------- correcting

    def correct(self, tenant: str, source_id: str, number: int, start: int, text: str | None) -> None:
        """Replace a sentence by `text`; "" strikes it out, None takes a correction back.

        `number` and `start` are as in `SummarySentence`. Raises `NotFound` where no sentence begins there,
        `InvalidRequest` for a text that is no single line of at most 400 characters."""
        wanted = None if text is None else text.strip()
        if wanted is not None and (len(wanted) > MAX_SENTENCE_CHARS or "\n" in wanted):
            raise InvalidRequest(
                f"A corrected sentence is one line of at most {MAX_SENTENCE_CHARS} characters.", param="text"
            )
        with self._store.write() as connection:
            source = _Source(connection, tenant, source_id)
            _work(connection, tenant, source_id)
            at, first, end = source.find(number, start)
            here = (CORRECTIONS.c.number == at, CORRECTIONS.c.start == first)
            connection.execute(CORRECTIONS.delete().where(*_of(CORRECTIONS, tenant, source_id), *here))
            if wanted is not None:
                values = {"number": at, "start": first, "end": end, "text": wanted, "written_at": self._clock()}
                connection.execute(CORRECTIONS.insert().values(tenant=tenant, source_id=source_id, **values))


class _Source:
    """One source's entries, read as they are needed, within one transaction."""

    def __init__(self, connection: sa.Connection, tenant: str, source_id: str) -> None:
        self._connection = connection
        self._tenant = tenant
        self.source_id = source_id
        self.analyser = Analyser()
        self._said: dict[int, _Said] = {}

    def said(self, numbers: Collection[int]) -> dict[int, _Said]:
        """Entries by their numbers; those that don't exist are left out."""
        missing = set(numbers) - set(self._said)
        if missing:
            query = sa.select(ENTRIES.c.id, ENTRIES.c.number, ENTRIES.c.speaker).where(
                *_of(ENTRIES, self._tenant, self.source_id), ENTRIES.c.number.in_(missing)
            )
            rows = self._connection.execute(query).all()
            texts = entries.texts(self._connection, [row.id for row in rows])
            for row in rows:
                text = texts[row.id]
                self._said[row.number] = _Said(text.text, row.speaker, text.page, text.start or 0)
        return {number: self._said[number] for number in numbers if number in self._said}

    def node(self, level: int, number: int) -> list[_Place]:
        query = sa.select(SUMMARIES.c.sentences).where(
            *_of(SUMMARIES, self._tenant, self.source_id),
            SUMMARIES.c.level == level,
            SUMMARIES.c.number == number,
        )
        return _unpack(self._connection.execute(query).scalar_one())

    def rarity(self, terms: Collection[int]) -> Callable[[int], float]:
        """How rare a term is among the tenant's entries, 0 to 1."""
        wanted, found = list(terms), dict[int, float]()
        for at in range(0, len(wanted), _MOST_VALUES):
            some = wanted[at : at + _MOST_VALUES]
            known = entries.statistics(self._connection, self._tenant, some)
            holders = [0, *(known.holders.get(term, 0) for term in some)]
            rare = inverse_frequency(holders, max(known.entries, 1))
            found |= zip(some, (rare[1:] / rare[0]).tolist(), strict=True)
        return found.__getitem__

    def corrections(self) -> list[Any]:
        query = sa.select(CORRECTIONS).where(*_of(CORRECTIONS, self._tenant, self.source_id))
        return list(self._connection.execute(query.order_by(CORRECTIONS.c.written_at)))

    def key(self, number: int, start: int) -> tuple[int, int]:
        """A place as `SummarySentence` has it."""
        said = self._said[number]
        return (number + 1, start) if said.page is None else (said.page, said.offset + start)

    def find(self, number: int, start: int) -> tuple[int, int, int]:
        """The entry's number and the sentence's characters in it. Raises `NotFound`."""
        query = sa.select(ENTRIES.c.number).where(
            *_of(ENTRIES, self._tenant, self.source_id),
            sa.or_(
                sa.and_(ENTRIES.c.page.is_(None), ENTRIES.c.number == number - 1),
                sa.and_(ENTRIES.c.page == number, ENTRIES.c.start <= start, ENTRIES.c.end > start),
            ),
        )
        for at in self._connection.execute(query).scalars():
            said = self.said([at])[at]
            for first, end in sentences(said.text):
                if said.offset + first == start:
                    return at, first, end
        raise NotFound(
            "No sentence begins there.", hint="The summary shows where its sentences begin.", param="start"
        )


def _grown(source: _Source, done: int) -> list[tuple[int, int, list[_Place]]]:
    """(level, number, places) of the leaf behind `done` entries, and of each node above that it completes."""
    number = done // LEAF_ENTRIES
    made = [(0, number, _leaf(source, done, done + LEAF_ENTRIES))]
    level = 0
    while (number + 1) % FAN_OUT == 0:
        children = [source.node(level, each) for each in range(number + 1 - FAN_OUT, number)]
        children.append(made[-1][2])
        level, number = level + 1, number // FAN_OUT
        places = [place for child in children for place in child]
        made.append((level, number, _merged(source, places)))
    return made


def _leaf(source: _Source, first: int, end: int) -> list[_Place]:
    said = source.said(range(first, end))
    found = [
        (number, start, stop, terms_of(each.text[start:stop], source.analyser))
        for number, each in said.items()
        for start, stop in sentences(each.text)
    ]
    rarity = source.rarity(frozenset().union(*(terms for *_, terms in found)))
    candidates = []
    for number, start, stop, terms in found:
        text = said[number].text[start:stop]
        value = score(text, terms, said[number].speaker == "user", rarity)
        candidates.append(Candidate(number, start, stop, value, cost_of(text), terms))
    return _chosen(candidates)


def _merged(source: _Source, places: Sequence[_Place]) -> list[_Place]:
    said = source.said({place.number for place in places})
    candidates = []
    for place in places:
        text = said[place.number].text[place.start : place.end]
        terms = terms_of(text, source.analyser)
        candidates.append(Candidate(place.number, place.start, place.end, place.score, cost_of(text), terms))
    return _chosen(candidates)


def _chosen(candidates: Sequence[Candidate]) -> list[_Place]:
    return [_Place(one.number, one.start, one.end, one.score) for one in choose(candidates, NODE_LETTERS)]


def _cover(source: _Source, done: int) -> list[list[_Place]]:
    """The fewest nodes that cover `done` entries, in order."""
    return [source.node(level, number) for level, number in _cover_places(done // LEAF_ENTRIES)]


def _cover_places(leaves: int) -> Iterator[tuple[int, int]]:
    level = 0
    while leaves >= FAN_OUT ** (level + 1):
        level += 1
    covered = 0
    for each in range(level, -1, -1):
        size = FAN_OUT**each
        for number in range(covered // size, leaves // size):
            yield each, number
        covered = leaves // size * size


def _shown(source: _Source, places: Sequence[_Place]) -> list[SummarySentence]:
    """Places as sentences, in order, with the user's corrections: all of them, wherever their sentence went."""
    corrections = {(row.number, row.start): row for row in source.corrections()}
    ends = {(place.number, place.start): place.end for place in places}
    ends |= {at: row.end for at, row in corrections.items()}
    said = source.said({number for number, _ in ends})
    found = []
    for (number, start), end in sorted(ends.items()):
        correction = corrections.get((number, start))
        text = said[number].text[start:end] if correction is None else correction.text
        if text:
            shown, first = source.key(number, start)
            speaker, last = said[number].speaker, first + end - start
            found.append(
                SummarySentence(source.source_id, shown, first, last, text, speaker, correction is not None)
            )
    return found


def _work(connection: sa.Connection, tenant: str, source_id: str) -> Any:
    row = connection.execute(sa.select(SUMMARY_WORK).where(*_of(SUMMARY_WORK, tenant, source_id))).first()
    if row is None:
        raise NotFound("There is no such session or file, or nothing is read of it yet.", param="source")
    return row


def _of(table: sa.Table, tenant: str, source_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return table.c.tenant == tenant, table.c.source_id == source_id


def _pack(places: Sequence[_Place]) -> bytes:
    rows = [(place.number, place.start, place.end, place.score) for place in places]
    return np.array(rows, _PLACE).tobytes()


def _unpack(blob: bytes) -> list[_Place]:
    return [_Place(*row) for row in np.frombuffer(blob, _PLACE).tolist()]
