"""Lays the scenes of a conversation on its days and numbers the turns.

The same seed gives the same history. Both languages share days, order, speakers and turn ids; only words differ. It
knows nothing of questions, but it notes for each turn why it's there, so that `questions` finds the evidence.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.memory_sets import wording
from bench.memory_sets.script import Conversation, Fact, Line, Milestone, Pair, Repeated, SmallTalk

SEED = 20261130
TURNS = 280
ASSISTANT = "Assistant"


@dataclass(frozen=True, slots=True)
class Turn:
    id: str
    time: dt.datetime
    speaker: str
    text: Pair


@dataclass(frozen=True, slots=True)
class Event:
    """What happened on `day` and was told in `turn`; `who` is the speaker's English name."""

    key: str
    day: dt.date
    turn: str
    who: str


@dataclass(frozen=True, slots=True)
class Item:
    """An order or an appointment: `told` and, once it's changed, `now` are the values of (number or date, date or
    time)."""

    kind: str
    name: Pair
    told: tuple[Pair, Pair]
    now: tuple[Pair, Pair] | None


@dataclass(slots=True)
class History:
    talk: Conversation
    turns: list[Turn] = field(default_factory=list)
    facts: dict[str, list[str]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)

    def turn(self, turn_id: str) -> Turn:
        return self.turns[int(turn_id.rsplit(".", 1)[1]) - 1]


@dataclass(slots=True)
class Scene:
    """Turns that follow each other on one day: (speaker's letter, text, tag of what the turn proves or "")."""

    day: int
    turns: list[tuple[str, Pair, str]]


class Scheduler:
    def __init__(self, talk: Conversation, chatter: SmallTalk) -> None:
        self._talk = talk
        self._chatter = chatter
        self._rng = random.Random(f"{SEED}:{talk.id}")
        self._letters = list(talk.speakers)
        self._scenes: list[Scene] = []
        self._event_days: dict[str, int] = {}
        self._items: list[Item] = []
        self._last_reply: Pair | None = None

    def history(self) -> History:
        """Seeded, so two calls on two schedulers give the same turns."""
        self._place_milestones()
        self._place_repeated()
        self._place_facts()
        self._place_items()
        self._place_small_talk()
        return self._number()

    # Who speaks

    def _main_speakers(self) -> list[str]:
        people = [letter for letter in self._letters if self._talk.speakers[letter].en != ASSISTANT]
        return people or self._letters

    def _someone(self) -> str:
        return self._rng.choice(self._main_speakers())

    def _other(self, speaker: str) -> str:
        return self._rng.choice([letter for letter in self._letters if letter != speaker])

    def _reply(self, speaker: str) -> Pair:
        robot = self._talk.speakers[speaker].en == ASSISTANT
        pool = self._chatter.assistant_replies if robot else self._chatter.replies
        reply = self._rng.choice([text for text in pool if text != self._last_reply])
        self._last_reply = reply
        return reply

    def _scene(self, day: int, speaker: str, text: Pair, tag: str, *, reply: float = 0.65) -> None:
        turns = [(speaker, text, tag)]
        if self._rng.random() < reply:
            other = self._other(speaker)
            turns.append((other, self._reply(other), ""))
        self._scenes.append(Scene(day, turns))

    # What happens when

    def _date(self, day: int) -> dt.date:
        return self._talk.start + dt.timedelta(days=day)

    def _place_milestones(self) -> None:
        count = len(self._talk.milestones)
        for index, milestone in enumerate(self._talk.milestones):
            day = milestone.day
            if day is None:
                day = round((index + 0.5) * self._talk.days / count) + self._rng.randint(-2, 2)
            self._event_days[milestone.key] = day
            self._tell_milestone(milestone, day)

    def _tell_milestone(self, milestone: Milestone, day: int) -> None:
        line = milestone.lines[0]
        text = line.text.fill(date=wording.day_text(self._date(day))) if milestone.retro_days else line.text
        told = min(day + milestone.retro_days, self._talk.days)
        self._scene(told, line.speaker or self._someone(), text, f"event:{milestone.key}")

    def _place_repeated(self) -> None:
        taken = set(self._event_days.values())
        for repeated in self._talk.repeated:
            happenings = [line for line in repeated.lines if line.evidence]
            free = [day for day in range(2, self._talk.days) if day not in taken]
            days = self._rng.sample(free, len(happenings))
            speakers = self._speakers_for(repeated, happenings)
            for line, day, speaker in zip(happenings, days, speakers, strict=True):
                self._scene(day, speaker, line.text, f"event:{repeated.key}")
            for line in repeated.lines:
                if not line.evidence:
                    self._scene(
                        self._rng.randint(1, self._talk.days), line.speaker or self._someone(), line.text, ""
                    )

    def _speakers_for(self, repeated: Repeated, happenings: list[Line]) -> list[str]:
        people = self._main_speakers()
        if not repeated.by_speaker:
            return [line.speaker or self._rng.choice(people) for line in happenings]
        shares = [people[index % len(people)] for index in range(len(happenings))]
        self._rng.shuffle(shares)
        return shares

    def _place_facts(self) -> None:
        followed = {fact.after for fact in self._talk.facts}
        placed: dict[str, int] = {}
        for fact in self._talk.facts:
            day = self._fact_day(fact, fact.key in followed, placed)
            placed[fact.key] = day
            tag = f"fact:{fact.key}"
            turns = [(line.speaker or self._someone(), line.text, tag * line.evidence) for line in fact.lines]
            if len(turns) == 1 and self._rng.random() < 0.6:
                other = self._other(turns[0][0])
                turns.append((other, self._reply(other), ""))
            self._scenes.append(Scene(day, turns))

    def _fact_day(self, fact: Fact, is_followed: bool, placed: dict[str, int]) -> int:
        last = self._talk.days
        if fact.at is not None:
            return min(last, max(1, round(fact.at * last) + self._rng.randint(-3, 3)))
        first = placed[fact.after] + 12 if fact.after else 1
        return self._rng.randint(first, round(0.55 * last) if is_followed else last)

    # Orders and appointments

    def _place_items(self) -> None:
        letters = "".join(self._rng.sample("ABCDEFGHKLMNPRSTUVWXZ", 2))
        for index, name in enumerate(self._talk.items["O"]):
            self._place_item("order", name, index, lambda day: self._order_values(letters, day))
        for index, name in enumerate(self._talk.items["A"]):
            self._place_item("visit", name, index, self._visit_values)
        for kind, patterns in (("OX", wording.ORDER_CONSIDERED), ("AX", wording.VISIT_WISHED)):
            for index, name in enumerate(self._talk.items[kind]):
                text = capital(patterns[index % len(patterns)].fill(item=name))
                self._scene(self._rng.randint(1, self._talk.days), self._someone(), text, "")

    def _order_values(self, letters: str, day: int) -> tuple[Pair, Pair]:
        number = wording.same(f"{letters}-{self._rng.randint(10000, 99999)}")
        return number, wording.day_text(self._date(day + self._rng.randint(5, 40)))

    def _visit_values(self, day: int) -> tuple[Pair, Pair]:
        hour, minute = self._rng.randint(8, 17), self._rng.choice((0, 10, 15, 20, 30, 40, 45))
        return wording.day_text(self._date(day + self._rng.randint(16, 45))), wording.same(f"{hour}:{minute:02}")

    def _place_item(self, kind: str, name: Pair, index: int, values: Callable[[int], tuple[Pair, Pair]]) -> None:
        told_as, changed_as = (
            (wording.ORDER_TOLD, wording.ORDER_CHANGED)
            if kind == "order"
            else (wording.VISIT_TOLD, wording.VISIT_MOVED)
        )
        day = self._rng.randint(1, round(0.75 * self._talk.days))
        told = values(day)
        text = told_as[index % len(told_as)].fill(item=name, **item_slots(kind, told))
        tag = f"fact:{kind}:{name.en}"
        self._scene(day, self._someone(), capital(text), tag)
        now = None
        if index < 2:
            later = day + self._rng.randint(4, 12)
            now = values(later)
            if kind == "order":
                now = (now[0], told[1])
            text = changed_as[index % len(changed_as)].fill(item=name, **item_slots(kind, now))
            self._scene(later, self._someone(), capital(text), f"{tag}:now")
        self._items.append(Item(kind, name, told, now))

    # Talk without facts

    def _place_small_talk(self) -> None:
        openers = [(topic, opener) for topic in self._chatter.topics for opener in topic.openers]
        self._rng.shuffle(openers)
        busy = [scene.day for scene in self._scenes]
        for opener, answer in self._talk.chats:
            speaker = self._someone()
            turns = [(speaker, opener, ""), (self._other(speaker), answer, "")]
            self._scenes.append(Scene(self._rng.choice(busy), turns))
        while sum(len(scene.turns) for scene in self._scenes) < TURNS:
            topic, opener = openers.pop()
            speaker = self._someone()
            other = self._other(speaker)
            robot = self._talk.speakers[other].en == ASSISTANT
            answer = self._reply(other) if robot else self._rng.choice(topic.replies)
            turns = [(speaker, opener, ""), (other, answer, "")]
            if self._rng.random() < 0.3:
                turns.append((speaker, self._reply(speaker), ""))
            day = self._rng.choice(busy) if self._rng.random() < 0.7 else self._rng.randint(0, self._talk.days)
            self._scenes.append(Scene(day, turns))

    # Numbers

    def _number(self) -> History:
        history = History(self._talk, items=self._items)
        days = sorted({scene.day for scene in self._scenes})
        for day in days:
            scenes = [scene for scene in self._scenes if scene.day == day]
            self._rng.shuffle(scenes)
            start = dt.datetime.combine(
                self._date(day), dt.time(self._rng.randint(7, 11), self._rng.randint(0, 59))
            )
            for scene in scenes:
                start = self._write(history, scene, start) + dt.timedelta(minutes=self._rng.randint(12, 55))
        return history

    def _write(self, history: History, scene: Scene, time: dt.datetime) -> dt.datetime:
        for letter, text, tag in scene.turns:
            speaker = self._talk.speakers[letter]
            turn = Turn(f"{self._talk.id}.{len(history.turns) + 1:04}", time, speaker.en, text)
            history.turns.append(turn)
            time += dt.timedelta(minutes=self._rng.randint(1, 4))
            kind, _, key = tag.partition(":")
            if kind == "event":
                day = self._event_days.get(key)
                date = self._date(day) if day is not None else turn.time.date()
                history.events.append(Event(key, date, turn.id, speaker.en))
            elif kind == "fact":
                history.facts.setdefault(key, []).append(turn.id)
        return time


def item_slots(kind: str, values: tuple[Pair, Pair]) -> dict[str, Pair]:
    return dict(zip(("number", "date") if kind == "order" else ("date", "time"), values, strict=True))


def capital(text: Pair) -> Pair:
    return Pair(text.en[:1].upper() + text.en[1:], text.zh)
