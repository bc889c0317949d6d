"""How answers of sessions came about: what their card shows when a conversation is opened again.

Knows rows and the `perilune` object's places. Of what an answer cites only the places are kept, no text and no
names: they are read from where they lie, so that nothing is left of a file, a turn or a fact that was deleted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa

from perilune.core import KeptAnswer
from perilune.memory.ratings import key_of
from perilune.memory.schema import ANSWERS, CORRECTIONS, ENTRIES, FACTS, FILES, PAGES

QUOTE_CHARS = 600
_LOOKED_UP = ("quote", "filename", "speaker", "at", "value")

Details = dict[str, Any]


def add(connection: sa.Connection, tenant: str, session_id: str, number: int, answer: KeptAnswer) -> None:
    """Keep an answer; `number` is the place of its question's entry in the session."""
    details = None if answer.details is None else json.dumps(_places(answer.details), ensure_ascii=False)
    row = {"tenant": tenant, "source_id": session_id, "number": number, "model": answer.model}
    connection.execute(ANSWERS.insert().values(id=key_of(answer.request_id), details=details, **row))


def read(
    connection: sa.Connection, tenant: str, session_id: str, first: int, last: int
) -> dict[int, tuple[str, Details]]:
    """(id, details) of the answers to the questions from place `first` to `last`, with what they cite."""
    mine = (ANSWERS.c.tenant == tenant, ANSWERS.c.source_id == session_id)
    query = sa.select(ANSWERS).where(*mine, ANSWERS.c.number.between(first, last))
    rows = connection.execute(query).all()
    looked_up = _LookUp(connection, tenant)
    found = {}
    for row in rows:
        details: Details = {} if row.details is None else json.loads(row.details)
        found[row.number] = (row.id, looked_up.complete(details))
    return found


def _places(details: Mapping[str, Any]) -> Details:
    """The details without what is looked up when they are read."""
    report = details.get("perilune")
    if report is None:
        return dict(details)
    kept = {**report, "citations": [_place(each) for each in report.get("citations", ())]}
    if "memory" in report:
        kept["memory"] = {part: [_place(each) for each in items] for part, items in report["memory"].items()}
    return {**details, "perilune": kept}


def _place(item: Mapping[str, Any]) -> Details:
    return {name: value for name, value in item.items() if name not in _LOOKED_UP}


class _LookUp:
    """Reads cited text from where it lies, each place once."""

    def __init__(self, connection: sa.Connection, tenant: str) -> None:
        self._connection = connection
        self._tenant = tenant
        self._names: dict[str, str | None] = {}

    def complete(self, details: Details) -> Details:
        """Citations with quotes and names again. What is gone has empty ones, and says so."""
        report = details.get("perilune")
        if report is None:
            return details
        cited = [(self._passage if "file_id" in each else self._turn)(each) for each in report["citations"]]
        completed = {**report, "citations": cited}
        if "memory" in report:
            readers: dict[str, Callable[[Details], Details]] = {"profile": self._fact, "summary": self._sentence}
            memory = report["memory"]
            completed["memory"] = {part: [read(each) for each in memory[part]] for part, read in readers.items()}
        return {**details, "perilune": completed}

    def _passage(self, place: Details) -> Details:
        file_id = place["file_id"]
        if file_id not in self._names:
            mine = (FILES.c.tenant == self._tenant, FILES.c.id == file_id)
            self._names[file_id] = self._connection.execute(sa.select(FILES.c.filename).where(*mine)).scalar()
        name = self._names[file_id]
        here = (PAGES.c.file_id == file_id, PAGES.c.number == place["page"])
        page = self._connection.execute(sa.select(PAGES.c.text, PAGES.c.start).where(*here)).first()
        if name is None or page is None:
            return {**place, "filename": "", "quote": "", "gone": True}
        text = page.text[place["start"] - page.start : place["end"] - page.start]
        return {**place, "filename": name, "quote": _cut(text)}

    def _turn(self, place: Details) -> Details:
        columns = (ENTRIES.c.text, ENTRIES.c.speaker, ENTRIES.c.at)
        row = self._connection.execute(sa.select(*columns).where(*self._entry(place))).first()
        if row is None:
            return {**place, "speaker": "", "at": None, "quote": "", "gone": True}
        return {**place, "speaker": row.speaker, "at": row.at, "quote": _cut(row.text)}

    def _fact(self, place: Details) -> Details:
        turn = place["turn"]
        said = FACTS.c.number.is_(None) if turn is None else FACTS.c.number == turn - 1
        mine = (FACTS.c.tenant == self._tenant, FACTS.c.key == place["key"], FACTS.c.source_id == place["session"])
        if place["session"] is None:
            mine = (*mine[:2], FACTS.c.source_id.is_(None))
        query = sa.select(FACTS.c.value).where(*mine, said, ~FACTS.c.ends).order_by(FACTS.c.id.desc()).limit(1)
        value = self._connection.execute(query).scalar()
        return {**place, "value": value} if value is not None else {**place, "value": "", "gone": True}

    def _sentence(self, place: Details) -> Details:
        if place["corrected"]:
            mine = (CORRECTIONS.c.tenant == self._tenant, CORRECTIONS.c.source_id == place["session"])
            here = (CORRECTIONS.c.number == place["turn"] - 1, CORRECTIONS.c.start == place["start"])
            text = self._connection.execute(sa.select(CORRECTIONS.c.text).where(*mine, *here)).scalar()
        else:
            said = self._connection.execute(sa.select(ENTRIES.c.text).where(*self._entry(place))).scalar()
            text = None if said is None else said[place["start"] : place["end"]]
        return {**place, "quote": text} if text is not None else {**place, "quote": "", "gone": True}

    def _entry(self, place: Details) -> tuple[sa.ColumnElement[bool], ...]:
        mine = (ENTRIES.c.tenant == self._tenant, ENTRIES.c.source_id == place["session"])
        return (*mine, ENTRIES.c.number == place["turn"] - 1)


def _cut(text: str) -> str:
    """As citations quote."""
    quote = text.strip()
    return quote if len(quote) <= QUOTE_CHARS else quote[:QUOTE_CHARS].rstrip() + "…"
