"""`python -m bench.memory_sets` writes the sets from their sources and checks them; the same bytes each time."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from bench.memory_sets import checks, script
from bench.memory_sets.questions import Questions
from bench.memory_sets.schedule import History, Scheduler

FOLDER = Path(__file__).resolve().parent.parent / "data" / "memory"
CONVERSATIONS = ("c1", "c2", "c3", "c4", "c5", "c6")
DOCUMENTS = ("contract", "manual", "report")
Record = dict[str, Any]


def documents(source: Path) -> list[Record]:
    records = []
    for name in DOCUMENTS:
        for lang in checks.LANGUAGES:
            text = (source / f"{name}.{lang}.txt").read_text(encoding="utf-8")
            pages = [page.strip() for page in text.split("=== page\n")]
            records += [
                {"document": name, "lang": lang, "page": page, "text": body} for page, body in enumerate(pages, 1)
            ]
    return records


def document_abstain(source: Path) -> list[Record]:
    records = []
    for name in DOCUMENTS:
        for miss in script.document_questions(source / f"{name}.qa.txt"):
            twin = {
                "kind": miss.twin.kind,
                "question": miss.twin.text.as_dict(),
                "answer": miss.twin.answer.as_dict(),
                "evidence": [f"{name}.p{miss.twin.keys[0]}"],
            }
            records.append({"source": name, "kind": miss.kind, "question": miss.text.as_dict(), "twin": twin})
    return records


def turns(history: History) -> list[Record]:
    names = {pair.en: pair.as_dict() for pair in history.talk.speakers.values()}
    return [
        {
            "history": history.talk.id,
            "lang": lang,
            "turn": turn.id,
            "time": turn.time.isoformat(),
            "speaker": names[turn.speaker][lang],
            "text": turn.text.as_dict()[lang],
        }
        for lang in checks.LANGUAGES
        for turn in history.turns
    ]


def events(history: History) -> list[Record]:
    names = {milestone.key: milestone.name.as_dict() for milestone in history.talk.milestones}
    return [
        {
            "history": history.talk.id,
            "event": event.key,
            "day": event.day.isoformat(),
            "turn": event.turn,
            "who": event.who,
            "name": names.get(event.key),
        }
        for event in history.events
    ]


def build(source: Path) -> dict[str, list[Record]]:
    chatter = script.small_talk(source / "smalltalk.txt")
    sets: dict[str, list[Record]] = {name: [] for name in checks.NAMES}
    for name in CONVERSATIONS:
        history = Scheduler(script.conversation(source / f"{name}.txt"), chatter).history()
        asked = Questions(history)
        sets["histories"] += turns(history)
        sets["events"] += events(history)
        sets["paired"] += asked.paired()
        sets["timeline"] += asked.timeline()
        sets["abstain"] += asked.abstain()
    sets["documents"] = documents(source)
    sets["abstain"] += document_abstain(source)
    for name in ("paired", "timeline", "abstain"):
        sets[name] = [{"id": f"{name[0]}{number:04}", **record} for number, record in enumerate(sets[name], 1)]
    return sets


def main() -> int:
    sets = build(FOLDER / "source")
    for name, records in sets.items():
        rows = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (FOLDER / f"{name}.jsonl").write_text(rows, encoding="utf-8")
        print(f"{name}: {len(records)} {dict(Counter(record.get('kind', '-') for record in records))}")
    faults = checks.Sets(checks.read(FOLDER)).faults()
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
