"""Reads the hand-written sources: conversations (`c1.txt` …), small talk, and questions about documents.

A source is lines `KEY text`, English and Chinese parted by ` | `, an answer after ` = `. It knows nothing of days
and turn numbers; `schedule` gives these. The format is described in `bench/data/memory/README.md`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


class ScriptError(ValueError):
    """A source line that can't be read; the message shows it."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same thing said in both languages."""

    en: str
    zh: str

    def fill(self, **slots: Pair) -> Pair:
        return Pair(
            self.en.format(**{name: value.en for name, value in slots.items()}),
            self.zh.format(**{name: value.zh for name, value in slots.items()}),
        )

    def as_dict(self) -> dict[str, str]:
        return {"en": self.en, "zh": self.zh}


@dataclass(frozen=True, slots=True)
class Line:
    """One turn of a scene; `speaker` None lets the schedule choose, `evidence` False is a reply or a distractor."""

    text: Pair
    speaker: str | None
    evidence: bool


@dataclass(frozen=True, slots=True)
class Question:
    """`keys` are the facts whose turns are the evidence (for documents: the page)."""

    kind: str
    keys: tuple[str, ...]
    text: Pair
    answer: Pair


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A question that the source doesn't answer, beside the answerable one that it resembles."""

    kind: str
    text: Pair
    twin: Question


@dataclass(slots=True)
class Fact:
    key: str
    after: str | None
    at: float | None
    lines: list[Line] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    misses: list[NearMiss] = field(default_factory=list)


@dataclass(slots=True)
class Milestone:
    """An event that happens once; with `retro_days` it's told that many days later, with its date in the text."""

    key: str
    retro_days: int
    day: int | None
    lines: list[Line] = field(default_factory=list)
    names: list[Pair] = field(default_factory=list)

    @property
    def name(self) -> Pair:
        return self.names[0]


@dataclass(slots=True)
class Repeated:
    """An event that happens several times, each time told in other words; questions have the slots who and win."""

    key: str
    by_speaker: bool
    questions: list[Pair] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)


@dataclass(slots=True)
class Conversation:
    id: str
    start: dt.date
    days: int
    title: Pair = Pair("", "")
    speakers: dict[str, Pair] = field(default_factory=dict)
    facts: list[Fact] = field(default_factory=list)
    milestones: list[Milestone] = field(default_factory=list)
    repeated: list[Repeated] = field(default_factory=list)
    chats: list[tuple[Pair, Pair]] = field(default_factory=list)
    items: dict[str, list[Pair]] = field(default_factory=lambda: {"O": [], "OX": [], "A": [], "AX": []})


@dataclass(slots=True)
class Topic:
    openers: list[Pair] = field(default_factory=list)
    replies: list[Pair] = field(default_factory=list)


@dataclass(slots=True)
class SmallTalk:
    topics: list[Topic] = field(default_factory=list)
    replies: list[Pair] = field(default_factory=list)
    assistant_replies: list[Pair] = field(default_factory=list)


def pair(text: str) -> Pair:
    parts = [part.strip() for part in text.split(" | ")]
    if len(parts) != 2 or not all(parts):
        raise ScriptError(f"not one English and one Chinese text: {text!r}")
    return Pair(*parts)


def attributes(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words if "=" in word)


def rows(path: Path) -> Iterator[tuple[str, str]]:
    """(key, rest) of each line that isn't empty or a comment."""
    for row in path.read_text(encoding="utf-8").splitlines():
        if row.strip() and not row.startswith("#"):
            key, _, rest = row.partition(" ")
            yield key, rest


def question(rest: str, default_key: str) -> Question:
    head, _, tail = rest.partition(" ")
    kind, _, keys = head.partition("@")
    asked, _, answer = tail.partition(" = ")
    return Question(kind, tuple(keys.split(",")) if keys else (default_key,), pair(asked), pair(answer))


def _line(key: str, rest: str, speakers: dict[str, Pair]) -> Line:
    speaker = key.rstrip("+-")
    if speaker and speaker not in speakers:
        raise ScriptError(f"nobody speaks as {speaker!r}")
    return Line(pair(rest), speaker or None, key.endswith("+"))


def _add_question(block: Fact | Milestone | Repeated, rest: str) -> None:
    if isinstance(block, Repeated):
        block.questions.append(pair(rest))
    elif isinstance(block, Fact):
        block.questions.append(question(rest, block.key))
    else:
        raise ScriptError("a milestone has no questions of its own")


def _open_block(talk: Conversation, key: str, rest: str) -> Fact | Milestone | Repeated:
    words = rest.split()
    options = attributes(words[1:])
    if key == "F":
        fact = Fact(words[0], options.get("after"), float(options["at"]) if "at" in options else None)
        talk.facts.append(fact)
        return fact
    if key == "M":
        day = int(options["day"]) if "day" in options else None
        milestone = Milestone(words[0], int(options.get("retro", 0)), day)
        talk.milestones.append(milestone)
        return milestone
    repeated = Repeated(words[0], "per" in words[1:])
    talk.repeated.append(repeated)
    return repeated


def conversation(path: Path) -> Conversation:
    """Raises ScriptError where a line doesn't fit the format."""
    talk: Conversation | None = None
    block: Fact | Milestone | Repeated | None = None
    opener: Pair | None = None
    for key, rest in rows(path):
        if key == "H":
            name, start, days = rest.split(" | ")
            talk = Conversation(name, dt.date.fromisoformat(start), int(days))
            continue
        if talk is None:
            raise ScriptError(f"{path.name} doesn't begin with H")
        if key == "T":
            talk.title = pair(rest)
        elif key == "S":
            letter, _, names = rest.partition(" | ")
            talk.speakers[letter] = pair(names)
        elif key in talk.items:
            talk.items[key].append(pair(rest))
        elif key == "C":
            opener = pair(rest)
        elif key == "c" and opener is not None:
            talk.chats.append((opener, pair(rest)))
        elif key in {"F", "M", "K"}:
            block = _open_block(talk, key, rest)
        elif block is None:
            raise ScriptError(f"{path.name}: {key} outside of a block")
        else:
            _fill_block(block, key, rest, talk.speakers)
    if talk is None:
        raise ScriptError(f"{path.name} is empty")
    return talk


def _fill_block(block: Fact | Milestone | Repeated, key: str, rest: str, speakers: dict[str, Pair]) -> None:
    if key == "Q":
        _add_question(block, rest)
    elif key == "U" and isinstance(block, Fact):
        kind, _, asked = rest.partition(" ")
        block.misses.append(NearMiss(kind, pair(asked), block.questions[-1]))
    elif key == "N" and isinstance(block, Milestone):
        block.names.append(pair(rest))
    else:
        block.lines.append(_line(key, rest, speakers))


def small_talk(path: Path) -> SmallTalk:
    talk = SmallTalk()
    for key, rest in rows(path):
        if key == "B":
            talk.topics.append(Topic())
        elif key == "o":
            talk.topics[-1].openers.append(pair(rest))
        elif key == "r":
            talk.topics[-1].replies.append(pair(rest))
        elif key == "a":
            talk.replies.append(pair(rest))
        elif key == "b":
            talk.assistant_replies.append(pair(rest))
        else:
            raise ScriptError(f"{path.name}: unknown key {key!r}")
    return talk


def document_questions(path: Path) -> list[NearMiss]:
    """Each answerable question of a document with its near miss; `keys` of the question is the page number."""
    found: list[NearMiss] = []
    asked: Question | None = None
    for key, rest in rows(path):
        if key == "Q":
            page, _, tail = rest.partition(" ")
            asked = question(f"single@{page} {tail}", page)
        elif key == "U" and asked is not None:
            kind, _, text = rest.partition(" ")
            found.append(NearMiss(kind, pair(text), asked))
        else:
            raise ScriptError(f"{path.name}: {key!r} isn't expected here")
    return found
