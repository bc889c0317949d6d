"""Makes the three sets from a scheduled history: paired questions, questions about time, and near misses.

It knows the annotated events and facts. The answers about order and count are computed here from the events;
`checks` computes them a second time from the written files.
"""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

from bench.memory_sets import wording
from bench.memory_sets.schedule import SEED, Event, History, Item
from bench.memory_sets.script import Pair, Question, Repeated

Record = dict[str, Any]


class Questions:
    """Questions of one history. Each method gives records as the files hold them, without their ids."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._talk = history.talk
        self._rng = random.Random(f"{SEED}:{history.talk.id}:questions")
        self._stale_facts = {fact.after: fact.key for fact in history.talk.facts if fact.after}
        self._names = {milestone.key: milestone.name for milestone in history.talk.milestones}
        once = [event for event in history.events if event.key in self._names]
        self._once = sorted(once, key=lambda event: event.day)
        self._asked = 0

    # Paired

    def paired(self) -> list[Record]:
        records = [self._fact_record(question) for fact in self._talk.facts for question in fact.questions]
        for item in self._history.items:
            records += self._item_records(item)
        records += self._comparisons()
        for event in self._rng.sample(self._once, 3):
            text = self._pattern(wording.DAY_ASKED).fill(a=self._names[event.key])
            records.append(self._record("date", text, wording.day_text(event.day), [event.turn]))
        return records

    def _comparisons(self) -> list[Record]:
        """Two appointments, of which one has been moved as a rule: both current turns are the evidence."""
        records = []
        visits = [item for item in self._history.items if item.kind == "visit"]
        for index, first in enumerate(visits):
            second = visits[(index + 1) % len(visits)]
            days = [calendar_day((item.now or item.told)[0]) for item in (first, second)]
            if days[0] == days[1]:
                continue
            sooner = first if days[0] < days[1] else second
            text = self._pattern(wording.SOONER_ASKED).fill(a=first.name, b=second.name)
            keys = [f"visit:{item.name.en}" for item in (first, second)]
            moved = [key for key, item in zip(keys, (first, second), strict=True) if item.now]
            evidence = [turn for key in keys for turn in self._history.facts[f"{key}:now" if key in moved else key]]
            stale = [turn for key in moved for turn in self._history.facts[key]]
            records.append(self._record("compare", text, sooner.name, evidence, stale))
        return records

    def _fact_record(self, question: Question) -> Record:
        evidence = [turn for key in question.keys for turn in self._history.facts[key]]
        stale: list[str] = []
        if question.kind == "update":
            old = [before for before, after in self._stale_facts.items() if after == question.keys[0]]
            stale = self._history.facts[old[0]]
        return self._record(question.kind, question.text, question.answer, evidence, stale)

    def _item_records(self, item: Item) -> list[Record]:
        key = f"{item.kind}:{item.name.en}"
        told = self._history.facts[key]
        order = item.kind == "order"
        first_asked = wording.ORDER_ASKED if order else wording.VISIT_DAY_ASKED
        second_asked = wording.ORDER_DATE_ASKED if order else wording.VISIT_TIME_ASKED
        kinds = ("id", "date") if order else ("date", "number")
        if item.now is None:
            asked = zip(kinds, (first_asked, second_asked), item.told, strict=True)
            return [self._record(k, self._pattern(p).fill(item=item.name), a, told) for k, p, a in asked]
        now = self._history.facts[f"{key}:now"]
        pattern = self._pattern(wording.ORDER_NOW_ASKED if order else first_asked)
        records = [self._record("update", pattern.fill(item=item.name), item.now[0], now, told)]
        if order:
            text = self._pattern(second_asked).fill(item=item.name)
            records.append(self._record("date", text, item.told[1], told))
        return records

    # Time

    def timeline(self) -> list[Record]:
        return [
            *self._firsts(),
            *self._lasts(),
            *self._sequences(),
            *self._sides(),
            *self._betweens(),
            *self._days(),
        ] + [record for repeated in self._talk.repeated for record in self._counts(repeated)]

    def _pick(self, count: int) -> list[Event]:
        """`count` different milestones in the order of time."""
        return sorted(self._rng.sample(self._once, count), key=lambda event: event.day)

    def _distinct(self, wanted: int, count: int) -> list[list[Event]]:
        found: list[list[Event]] = []
        while len(found) < wanted:
            events = self._pick(count)
            if events not in found:
                found.append(events)
        return found

    def _firsts(self) -> list[Record]:
        records = []
        for index, (early, late) in enumerate(self._distinct(6, 2)):
            shown = (early, late) if index % 2 else (late, early)
            text = self._pattern(wording.FIRST_ASKED).fill(a=self._name(shown[0]), b=self._name(shown[1]))
            op = {"op": "first", "events": [early.key, late.key]}
            records.append(self._record("first", text, self._name(early), [early.turn, late.turn], op=op))
        return records

    def _lasts(self) -> list[Record]:
        records = []
        for events in self._distinct(3, 4):
            shown = self._rng.sample(events, 4)
            names = dict(zip("abcd", map(self._name, shown), strict=True))
            text = self._pattern(wording.LAST_ASKED).fill(**names)
            op = {"op": "last", "events": [event.key for event in events]}
            records.append(self._record("last", text, self._name(events[-1]), [e.turn for e in events], op=op))
        return records

    def _sequences(self) -> list[Record]:
        records = []
        for events in self._distinct(6, 3):
            shown = events
            while shown == events:
                shown = self._rng.sample(events, 3)
            text = self._pattern(wording.SEQUENCE_ASKED).fill(
                **dict(zip("abc", map(self._name, shown), strict=True))
            )
            answer = Pair("; ".join(self._name(e).en for e in events), "；".join(self._name(e).zh for e in events))
            op = {"op": "sequence", "events": [event.key for event in events]}
            records.append(self._record("sequence", text, answer, [event.turn for event in events], op=op))
        return records

    def _sides(self) -> list[Record]:
        records = []
        for index, (early, late) in enumerate(self._distinct(4, 2)):
            a, b, side = (early, late, "before") if index % 2 else (late, early, "after")
            text = self._pattern(wording.SIDE_ASKED).fill(a=self._name(a), b=self._name(b))
            op = {"op": "side", "events": [a.key, b.key]}
            records.append(self._record("before_after", text, wording.SIDES[side], [a.turn, b.turn], op=op))
        return records

    def _betweens(self) -> list[Record]:
        records = []
        last = len(self._once) - 1
        for start in self._rng.sample(range(last - 1), 3):
            left, middle, right = self._once[start : start + 3]
            others = [event for event in self._once if event not in (left, middle, right)]
            shown = [middle, *self._rng.sample(others, 2)]
            self._rng.shuffle(shown)
            names = dict(zip("bcd", map(self._name, shown), strict=True))
            text = self._pattern(wording.BETWEEN_ASKED).fill(a=self._name(left), e=self._name(right), **names)
            op = {"op": "between", "events": [left.key, right.key], "choices": [event.key for event in shown]}
            evidence = [left.turn, right.turn, *(event.turn for event in shown)]
            records.append(self._record("between", text, self._name(middle), evidence, op=op))
        return records

    def _days(self) -> list[Record]:
        records = []
        for early, late in self._distinct(3, 2):
            text = self._pattern(wording.DAYS_ASKED).fill(a=self._name(early), b=self._name(late))
            op = {"op": "days", "events": [early.key, late.key]}
            answer = wording.same(str((late.day - early.day).days))
            records.append(self._record("days_between", text, answer, [early.turn, late.turn], op=op))
        return records

    # Counts

    def _counts(self, repeated: Repeated) -> list[Record]:
        events = [event for event in self._history.events if event.key == repeated.key]
        records: list[Record] = []
        for who in sorted({event.who for event in events}) if repeated.by_speaker else [None]:
            mine = [event for event in events if who is None or event.who == who]
            records.append(self._count(repeated, mine, Pair("", ""), {"who": who}, None))
            records += self._windows(repeated, mine, who)
        return records

    def _windows(self, repeated: Repeated, mine: list[Event], who: str | None) -> list[Record]:
        records = []
        anchors = self._rng.sample(self._once[3:-2], 2)
        for side, pattern, anchor in zip(
            ("before", "after"), (wording.BEFORE, wording.AFTER), anchors, strict=True
        ):
            inside = [event for event in mine if (event.day < anchor.day) == (side == "before")]
            if inside and len(inside) < len(mine):
                window = pattern.fill(a=self._name(anchor))
                records.append(self._count(repeated, inside, window, {"who": who, side: anchor.key}, anchor))
        months = [event.day.month for event in mine]
        month = max(sorted(set(months)), key=months.count)
        inside = [event for event in mine if event.day.month == month]
        if len(inside) < len(mine):
            scope = {"who": who, "month": month}
            records.append(self._count(repeated, inside, wording.month_text(month), scope, None))
        return records

    def _count(
        self, repeated: Repeated, inside: list[Event], window: Pair, scope: dict[str, Any], anchor: Event | None
    ) -> Record:
        who = self._who(scope["who"])
        text = self._pattern(repeated.questions).fill(who=who, win=window)
        evidence = [event.turn for event in inside] + ([anchor.turn] if anchor else [])
        op = {"op": "count", "events": [repeated.key], **scope}
        return self._record("count", text, wording.same(str(len(inside))), evidence, op=op)

    # Near misses

    def abstain(self) -> list[Record]:
        records = [
            self._miss(miss.kind, miss.text, self._fact_record(miss.twin))
            for fact in self._talk.facts
            for miss in fact.misses
        ]
        for kind, asked, never in (
            ("order", wording.ORDER_ASKED, "OX"),
            ("visit", wording.VISIT_DAY_ASKED, "AX"),
        ):
            items = [item for item in self._history.items if item.kind == kind and item.now is None]
            for index, name in enumerate(self._talk.items[never]):
                pattern = self._pattern(asked)
                twin_item = items[index % len(items)]
                twin_turns = self._history.facts[f"{kind}:{twin_item.name.en}"]
                twin = self._record("id", pattern.fill(item=twin_item.name), twin_item.told[0], twin_turns)
                records.append(self._miss("never", pattern.fill(item=name), twin))
        return records + self._empty_days()

    def _empty_days(self) -> list[Record]:
        """A day on which nothing was told and which no turn names, beside one on which something happened."""
        told = {turn.time.date() for turn in self._history.turns}
        texts = " ".join(turn.text.zh for turn in self._history.turns)
        span = [self._talk.start + dt.timedelta(days=day) for day in range(5, self._talk.days - 5)]
        named = {event.day for event in self._history.events}
        empty = [d for d in span if d not in told | named and wording.day_text(d).zh not in texts]
        records = []
        for day, event in zip(self._rng.sample(empty, 3), self._rng.sample(self._once, 3), strict=True):
            pattern = self._pattern(wording.HAPPENED_ASKED)
            asked = pattern.fill(date=wording.day_text(event.day))
            twin = self._record("event", asked, self._name(event), [event.turn])
            records.append(self._miss("date", pattern.fill(date=wording.day_text(day)), twin))
        return records

    def _miss(self, kind: str, text: Pair, twin: Record) -> Record:
        kept = {name: twin[name] for name in ("kind", "question", "answer", "evidence")}
        return {"source": self._talk.id, "kind": kind, "question": text.as_dict(), "twin": kept}

    # Shared

    def _who(self, name: str | None) -> Pair:
        found = [pair for pair in self._talk.speakers.values() if pair.en == name]
        return found[0] if found else Pair("", "")

    def _name(self, event: Event) -> Pair:
        return self._names[event.key]

    def _pattern(self, patterns: tuple[Pair, ...] | list[Pair]) -> Pair:
        """The patterns in turn, so that none is used more often than the others."""
        self._asked += 1
        return patterns[self._asked % len(patterns)]

    def _record(
        self,
        kind: str,
        text: Pair,
        answer: Pair,
        evidence: list[str],
        stale: list[str] | None = None,
        op: dict[str, Any] | None = None,
    ) -> Record:
        record: Record = {
            "history": self._talk.id,
            "kind": kind,
            "question": Pair(text.en[:1].upper() + text.en[1:], text.zh).as_dict(),
            "answer": answer.as_dict(),
            "evidence": sorted(set(evidence)),
        }
        if stale:
            record["stale"] = stale
        if op:
            record["op"] = op
        return record


def calendar_day(day: Pair) -> tuple[int, int]:
    """(month, day) of a date as the history says it; all of one history's dates lie in one year."""
    number, month = day.en.split()
    return wording.MONTHS.index(month), int(number)
