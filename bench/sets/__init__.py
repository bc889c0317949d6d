"""Labelled public sets for retrieval: entries to store and questions whose evidence is known.

Read from a folder that `--data` or PERILUNE_BENCH_DATA names; licences forbid keeping them here. bench/README.md
says where they come from.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LOCOMO = "locomo_dev6.json"
CMRC = "cmrc2018_trial.json"
LIFEBENCH = ("lifebench_zh_user1", "lifebench_zh_user2")
_KINDS = ("agent_chat", "calendar", "call", "note", "photo", "push", "sms")
_ADVERSARIAL = 5  # LoCoMo's category: what one did is asked of the other
_NOT_TEXT = frozenset(
    (
        *("event_id", "phone_id", "type", "datetime", "datetime_end", "start_time", "end_time", "date"),
        *("phoneNumber", "contact_phone_number", "push_status", "jump_path", "shoot_mode", "image_size"),
        *("direction", "call_result", "action"),
    )
)


@dataclass(frozen=True, slots=True)
class Item:
    """An entry: `key` is what evidence names, `session` what it belongs to, in order."""

    key: str
    session: str
    text: str
    speaker: str = ""
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """`answerable` is false where the text that `evidence` names is only about something like it."""

    text: str
    evidence: tuple[str, ...]
    asked: datetime | None = None
    answerable: bool = True


@dataclass(frozen=True, slots=True)
class Corpus:
    """One conversation, person or collection, that is searched by itself."""

    name: str
    items: tuple[Item, ...]
    questions: tuple[Question, ...]


def locomo(folder: Path) -> Iterator[Corpus]:
    """Conversations of two people over months; turn level; questions of all categories that have evidence."""
    for record in json.loads((folder / LOCOMO).read_text(encoding="utf-8")):
        conversation = record["conversation"]
        names = sorted((k for k in conversation if re.fullmatch(r"session_\d+", k)), key=lambda k: int(k[8:]))
        items = []
        for name in names:
            at = datetime.strptime(conversation[f"{name}_date_time"], "%I:%M %p on %d %B, %Y").replace(tzinfo=UTC)
            for turn in conversation[name]:
                caption = turn.get("blip_caption")
                text = turn["text"] + (f" [image: {caption}]" if caption else "")
                items.append(Item(turn["dia_id"], name, text, turn["speaker"], at.timestamp()))
        last = max(item.at or 0.0 for item in items)
        asked = datetime.fromtimestamp(last + 86_400, UTC)
        known = {item.key for item in items}
        questions = [
            Question(qa["question"], evidence, asked, qa.get("category") != _ADVERSARIAL)
            for qa in record["qa"]
            if (evidence := _known(re.findall(r"D\d+:\d+", " ".join(qa.get("evidence", []))), known))
        ]
        yield Corpus(record["sample_id"], tuple(items), tuple(questions))


def cmrc(folder: Path) -> Iterator[Corpus]:
    """Chinese passages, each a session of its own; the evidence of a question is its passage."""
    items, questions = [], []
    for article in json.loads((folder / CMRC).read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            key = paragraph["id"]
            items.append(Item(key, key, paragraph["context"]))
            questions += [Question(qa["question"], (key,)) for qa in paragraph["qas"]]
    yield Corpus("cmrc", tuple(items), tuple(questions))


def lifebench(folder: Path) -> Iterator[Corpus]:
    """A year of one person's records, each an entry, in one session for each kind of record."""
    for user in LIFEBENCH:
        items = [item for kind in _KINDS for item in _records(folder / user / f"{kind}.json.gz", kind)]
        items.sort(key=lambda item: item.at or 0.0)
        known = {item.key for item in items}
        questions = []
        for qa in _read(folder / user / "QA_clean.json.gz"):
            evidence = _known([f"{e['type']}:{e['id']}" for e in qa.get("evidence", [])], known)
            if evidence:
                questions.append(Question(qa["question"], evidence, _month_end(qa.get("ask_time"))))
        yield Corpus(user, tuple(items), tuple(questions))


def _records(path: Path, kind: str) -> Iterator[Item]:
    for record in _read(path):
        if kind == "photo":
            record.pop("title")  # IMG_20250112_120000
        text = _chat(record["conversation"]) if kind == "agent_chat" else _text(record)
        when = str(record.get("datetime") or record.get("date") or "")
        yield Item(f"{kind}:{record['phone_id']}", kind, text, record.get("contactName") or "", _at(when))


def _chat(conversation: Any) -> str:
    turns = conversation.values() if isinstance(conversation, dict) else conversation
    lines = []
    for turn in turns:
        for who, said in turn.items():
            lines.append(f"{who}: {said['content'] if isinstance(said, dict) else said}")
    return "\n".join(lines)


def _text(value: Any) -> str:
    """All that a record says, without ids, numbers of phones and states."""
    if isinstance(value, dict):
        return " ".join(filter(None, (_text(held) for name, held in value.items() if name not in _NOT_TEXT)))
    if isinstance(value, list):
        return " ".join(filter(None, map(_text, value)))
    return "" if value in (None, "无") else str(value)


def _at(when: str) -> float | None:
    for form, length in (("%Y-%m-%d %H:%M:%S", 19), ("%Y-%m-%d", 10)):
        try:
            return datetime.strptime(when[:length], form).replace(tzinfo=UTC).timestamp()
        except ValueError:
            continue
    return None


def _month_end(when: str | None) -> datetime | None:
    """The 28th of `2025-01`: the set says in which month a question is asked."""
    match = re.match(r"(\d{4})-(\d{1,2})", when or "")
    return datetime(int(match[1]), int(match[2]), 28, tzinfo=UTC) if match else None


def _known(named: list[str], known: set[str]) -> tuple[str, ...]:
    return tuple(key for key in dict.fromkeys(named) if key in known)


def _read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found: list[dict[str, Any]] = json.load(file)
    return found
