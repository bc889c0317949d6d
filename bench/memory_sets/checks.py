"""Checks the written sets against each other and computes every order and count again from `events.jsonl`.

It reads nothing but the files that the benches read, so that it doesn't share a mistake with what wrote them.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
LANGUAGES = ("en", "zh")
VERBATIM = {"single", "paraphrase", "number", "date", "id", "update", "original", "negation"}
# The answer to these is one of the choices that the question names.
CHOICES = {"compare", "first", "last", "sequence", "before_after", "between"}
NAMES = ("histories", "documents", "events", "paired", "timeline", "abstain")
HAN = re.compile(r"[\u4e00-\u9fff]")


def read(folder: Path) -> dict[str, list[Record]]:
    return {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in NAMES
    }


class Sets:
    """All sets of one folder, with what is needed to look turns, pages and events up."""

    def __init__(self, records: dict[str, list[Record]]) -> None:
        self._records = records
        self._texts: dict[tuple[str, str], str] = {}
        self._speakers: dict[str, str] = {}
        self._days: dict[str, str] = {}
        for turn in records["histories"]:
            self._texts[turn["turn"], turn["lang"]] = turn["text"]
            self._days[turn["turn"]] = turn["time"][:10]
        for page in records["documents"]:
            self._texts[f"{page['document']}.p{page['page']}", page["lang"]] = page["text"]
        self._events: dict[tuple[str, str], list[Record]] = {}
        for event in records["events"]:
            self._events.setdefault((event["history"], event["event"]), []).append(event)

    def faults(self) -> list[str]:
        """What is wrong, one sentence each; empty when all invariants hold."""
        return [
            *self._size_faults(),
            *self._text_faults(),
            *self._evidence_faults(),
            *self._answer_faults(),
            *self._time_faults(),
            *self._twice(),
        ]

    def _size_faults(self) -> Iterator[str]:
        for name, least in (("paired", 240), ("timeline", 220), ("abstain", 200)):
            if len(self._records[name]) < least:
                yield f"{name} holds {len(self._records[name])} questions, {least} are needed"
        turns = Counter((turn["history"], turn["lang"]) for turn in self._records["histories"])
        yield from (f"{key} has {count} turns only" for key, count in turns.items() if count < 250)
        pages = Counter((page["document"], page["lang"]) for page in self._records["documents"])
        yield from (f"{key} has {count} pages only" for key, count in pages.items() if count < 6)

    def _questions(self) -> Iterator[tuple[str, Record]]:
        """(id, record with question, answer, evidence) of all that can be answered."""
        for name in ("paired", "timeline"):
            yield from ((record["id"], record) for record in self._records[name])
        yield from ((f"{record['id']} twin", record["twin"]) for record in self._records["abstain"])

    def _text_faults(self) -> Iterator[str]:
        texts = [(key[0], key[1], text) for key, text in self._texts.items()]
        for name in ("paired", "timeline", "abstain"):
            for record in self._records[name]:
                texts += [(record["id"], lang, record["question"][lang]) for lang in LANGUAGES]
        for where, lang, text in texts:
            han = len(HAN.findall(text))
            letters = len(re.findall(r"[A-Za-z]", text))
            if "{" in text or "  " in text:
                yield f"{where} {lang} has a slot or a gap: {text}"
            if lang == "en" and han > 8:
                yield f"{where} isn't English: {text}"
            if lang == "zh" and (han < 1 or letters > 2 * han + 12):
                yield f"{where} isn't Chinese: {text}"

    def _evidence_faults(self) -> Iterator[str]:
        for where, record in self._questions():
            turns = [*record["evidence"], *record.get("stale", [])]
            if not record["evidence"] or len(turns) != len(set(turns)):
                yield f"{where} has no evidence, or the same twice"
            missing = [turn for turn in turns for lang in LANGUAGES if (turn, lang) not in self._texts]
            if missing:
                yield f"{where} names turns that don't exist: {missing}"

    def _answer_faults(self) -> Iterator[str]:
        for where, record in self._questions():
            for lang in LANGUAGES:
                answer = record["answer"][lang].casefold()
                asked = record["question"][lang].casefold()
                kind = record.get("kind", "single")
                told = " ".join(self._texts.get((turn, lang), "") for turn in record["evidence"]).casefold()
                dated = kind == "date" and self._is_event_day(record)
                if kind in VERBATIM and answer not in told and not dated:
                    yield f"{where} {lang}: {answer!r} isn't in its evidence: {told[:200]}"
                if kind not in CHOICES and leaks(answer, asked):
                    yield f"{where} {lang}: the question holds its answer {answer!r}: {asked}"

    def _is_event_day(self, record: Record) -> bool:
        turn = record["evidence"][0]
        days = {event["day"] for event in self._records["events"] if event["turn"] == turn}
        day = dt.date.fromisoformat(self._days[turn])
        return {day.isoformat()} == days and f"{day.month}月{day.day}日" == record["answer"]["zh"]

    def _twice(self) -> Iterator[str]:
        for name in ("paired", "timeline", "abstain"):
            for lang in LANGUAGES:
                keys = [
                    (r.get("history", r.get("source")), plain(r["question"][lang])) for r in self._records[name]
                ]
                yield from (f"{name} asks twice: {key}" for key, count in Counter(keys).items() if count > 1)
        unanswerable = {(r["source"], plain(r["question"]["en"])) for r in self._records["abstain"]}
        answered = {(r["history"], plain(r["question"]["en"])) for r in self._records["paired"]}
        yield from (f"{key} is both answerable and not" for key in unanswerable & answered)

    # Orders and counts once more

    def _time_faults(self) -> Iterator[str]:
        for record in self._records["timeline"]:
            answer, turns = self._solve(record)
            if answer != record["answer"]:
                yield f"{record['id']} says {record['answer']}, the events say {answer}"
            if sorted(turns) != record["evidence"]:
                yield f"{record['id']} has evidence {record['evidence']}, the events say {sorted(turns)}"

    def _solve(self, record: Record) -> tuple[dict[str, str], list[str]]:
        op = record["op"]
        if op["op"] == "count":
            return self._solve_count(record["history"], op)
        keys = [*op["events"], *op.get("choices", [])]
        events = {key: self._events[record["history"], key][0] for key in keys}
        turns = [event["turn"] for event in events.values()]
        in_time = sorted(events.values(), key=lambda event: event["day"])
        left, right = (events[key]["day"] for key in op["events"][:2])
        if op["op"] == "side":
            return {"en": "before", "zh": "之前"} if left < right else {"en": "after", "zh": "之后"}, turns
        if op["op"] == "days":
            days = str((dt.date.fromisoformat(right) - dt.date.fromisoformat(left)).days)
            return {"en": days, "zh": days}, turns
        if op["op"] == "sequence":
            return {
                lang: mark.join(e["name"][lang] for e in in_time) for lang, mark in (("en", "; "), ("zh", "；"))
            }, turns
        if op["op"] == "between":
            inside = [event for event in in_time if left < event["day"] < right]
            assert len(inside) == 1, record["id"]
            return inside[0]["name"], turns
        return in_time[0 if op["op"] == "first" else -1]["name"], turns

    def _solve_count(self, history: str, op: Record) -> tuple[dict[str, str], list[str]]:
        found = self._events[history, op["events"][0]]
        turns = []
        if op.get("who"):
            found = [event for event in found if event["who"] == op["who"]]
        if "month" in op:
            found = [event for event in found if int(event["day"][5:7]) == op["month"]]
        for side in ("before", "after"):
            if side in op:
                anchor = self._events[history, op[side]][0]
                found = [event for event in found if (event["day"] < anchor["day"]) == (side == "before")]
                turns.append(anchor["turn"])
        return {"en": str(len(found)), "zh": str(len(found))}, turns + [event["turn"] for event in found]


def plain(text: str) -> str:
    return re.sub(r"\W+", "", text).casefold()


def leaks(answer: str, asked: str) -> bool:
    if answer.isascii():
        return re.search(rf"(?<![a-z0-9]){re.escape(answer)}(?![a-z0-9])", asked) is not None
    return answer in asked
