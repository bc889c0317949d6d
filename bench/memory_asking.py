"""Stores the histories and documents of `data/memory` and asks their questions, as the service would.

Knows memory and the sets' files, no figures. Every source in every language is a tenant of its own. A document goes
through the library (parsed, cut into passages); a passage counts for the page that holds most of it.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

from perilune.memory import entries
from perilune.memory.embed.protocol import Embedder
from perilune.memory.entries import Entry
from perilune.memory.indexer import Indexer
from perilune.memory.library import Library
from perilune.memory.memory import Memory, Turn
from perilune.memory.retrieve import Found, Hit
from perilune.memory.scope import Scope
from perilune.memory.store import Store
from perilune.memory.synonyms import Synonyms
from perilune.memory.vectors.lance import LanceIndex

FOLDER = Path(__file__).resolve().parent / "data" / "memory"
LANGUAGES = ("en", "zh")
DEEPEST = 20
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """A question in one language. `twin` is an answerable one beside an `abstain` one, which the source doesn't
    answer though it is about it; `foreign` is a twin that is asked of another source. Both have no evidence."""

    set: str  # paired, timeline, abstain, twin, foreign
    id: str
    source: str
    kind: str
    lang: str
    text: str
    evidence: tuple[str, ...]
    stale: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a case got: keys of the hits, best first, and of the set of evidence, in order of time."""

    case: Case
    hits: tuple[str, ...]
    evidence: tuple[str, ...]
    found: Found


def fitting(sources: Sequence[str]) -> frozenset[str]:
    """The half of these sources that may be looked at and fitted on: the lower by the hash of its id."""
    ordered = sorted(sources, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return frozenset(ordered[: (len(ordered) + 1) // 2])


def histories() -> dict[str, list[dict[str, Any]]]:
    """Turns of each history, both languages."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in _rows("histories"):
        found.setdefault(row["history"], []).append(row)
    return found


def documents() -> dict[str, list[dict[str, Any]]]:
    """Pages of each document, both languages."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in _rows("documents"):
        found.setdefault(row["document"], []).append(row)
    return found


def halves() -> tuple[frozenset[str], frozenset[str]]:
    """(sources for fitting, sources held out), histories and documents split each for themselves."""
    told, written = list(histories()), list(documents())
    fit = fitting(told) | fitting(written)
    return fit, frozenset([*told, *written]) - fit


def cases() -> Iterator[Case]:
    """Every question of the three sets in both languages."""
    elsewhere = {
        source: other
        for half in halves()
        for source, other in zip(sorted(half), [*sorted(half)[1:], *sorted(half)[:1]], strict=True)
    }
    for lang in LANGUAGES:
        for name in ("paired", "timeline"):
            for row in _rows(name):
                text, stale = row["question"][lang], tuple(row.get("stale", ()))
                yield Case(name, row["id"], row["history"], row["kind"], lang, text, tuple(row["evidence"]), stale)
        for row in _rows("abstain"):
            twin, source = row["twin"], row["source"]
            text, evidence = twin["question"][lang], tuple(twin["evidence"])
            yield Case("abstain", row["id"], source, row["kind"], lang, row["question"][lang], ())
            yield Case("twin", row["id"], source, twin["kind"], lang, text, evidence)
            yield Case("foreign", row["id"], elsewhere[source], twin["kind"], lang, text, ())


class Sources:
    """The sources that `only` names, stored under `home`."""

    def __init__(self, home: Path, embedder: Embedder | None, only: frozenset[str]) -> None:
        self._store = Store(home)
        index = LanceIndex(home / "index", *((embedder.model, embedder.width) if embedder else ("none", 1)))
        self.memory = Memory(self._store, index, embedder, Synonyms.load(), Indexer(self._store, index, embedder))
        self._library = Library(self._store, home, memory=self.memory)
        self._keys: dict[tuple[str, str, int], str] = {}
        self._pages: dict[str, tuple[str, list[int]]] = {}
        self._asked_at: dict[str, datetime] = {}
        for name, turns in histories().items():
            if name in only:
                self._add_history(name, turns)
        for name, pages in documents().items():
            if name in only:
                self._add_document(name, pages)

    def settle(self, timeout_s: float) -> None:
        self.memory.start()
        self.memory.settled(timeout_s)

    def close(self) -> None:
        self.memory.close()
        self._store.close()

    def ask(self, case: Case) -> Asked:
        """The question as somebody would ask it on the day after the last turn."""
        scope, now = self.scope(case)
        tenant = scope.tenant
        found = self.memory.search(case.text, scope, DEEPEST, now=now)
        hits, evidence = (tuple(self._key(tenant, hit) for hit in part) for part in (found.hits, found.evidence))
        return Asked(case, hits, evidence, found)

    def scope(self, case: Case) -> tuple[Scope, datetime | None]:
        """Where and when a case is asked."""
        return Scope(f"{case.source}-{case.lang}"), self._asked_at.get(case.source)

    def keys(self, tenant: str, pool: Sequence[Entry]) -> list[str]:
        """Of turns."""
        return [self._keys[tenant, entry.source_id, entry.number] for entry in pool]

    def texts(self, pool: Sequence[Entry]) -> list[str]:
        """What turns say."""
        with self._store.read() as connection:
            said = entries.texts(connection, [entry.id for entry in pool])
        return [said[entry.id].text for entry in pool]

    def _add_history(self, name: str, turns: Sequence[dict[str, Any]]) -> None:
        for lang in LANGUAGES:
            mine = [turn for turn in turns if turn["lang"] == lang]
            times = [datetime.fromisoformat(turn["time"]).replace(tzinfo=UTC) for turn in mine]
            said = [
                Turn(turn["speaker"], turn["text"], at.timestamp()) for turn, at in zip(mine, times, strict=True)
            ]
            tenant = f"{name}-{lang}"
            self.memory.add_turns(tenant, name, said)
            self._keys |= {(tenant, name, number): turn["turn"] for number, turn in enumerate(mine)}
            self._asked_at[name] = times[-1] + timedelta(days=1)

    def _add_document(self, name: str, pages: Sequence[dict[str, Any]]) -> None:
        for lang in LANGUAGES:
            texts = [page["text"] + "\n\n" for page in pages if page["lang"] == lang]
            tenant = f"{name}-{lang}"
            data = io.BytesIO("".join(texts).encode())
            record = self._library.add_file(tenant, f"{name}.txt", "assistants", data, _MAX_BYTES)
            for _ in self._library.parse(tenant, record.file_id):
                pass
            self._pages[record.file_id] = (name, list(accumulate(map(len, texts))))

    def _key(self, tenant: str, hit: Hit) -> str:
        if hit.source_id not in self._pages:
            return self._keys[tenant, hit.source_id, hit.number]
        name, ends = self._pages[hit.source_id]
        middle = ((hit.start or 0) + (hit.end or 0)) / 2
        return f"{name}.p{1 + sum(end <= middle for end in ends)}"


def _rows(name: str) -> Iterator[dict[str, Any]]:
    with (FOLDER / f"{name}.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)
