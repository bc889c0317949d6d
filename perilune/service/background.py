"""What a prompt says of the user and of the session so far: lines of the profile and of the rolling summary.

Pure functions over facts, sentences and a counting function; doesn't know where they come from or how prompts
look. Both stand in an order that rarely changes (facts as they were learnt, sentences as they were said),
before what a search finds anew for every question, so that consecutive prompts of a session begin alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perilune.core import ProfileFact, SummarySentence

PROFILE_TOKENS = 192
SUMMARY_TOKENS = 256
"""Most tokens of each, headings included."""

WINDOW_SHARE = 1 / 16
"""And the largest part of the room for a prompt that each takes."""

PROFILE_HEADING = "What the user has said about themselves:\n"
SUMMARY_HEADING = "From earlier in this conversation:\n"
_FIRST_KEYS = ("name", "residence", "deadline")

Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Background:
    """What entered the prompt, and its text."""

    text: str = ""
    facts: tuple[ProfileFact, ...] = ()
    sentences: tuple[SummarySentence, ...] = ()


def budget(most: int, room: int, spare: int) -> int:
    """Tokens for a part, of `room` for a prompt of which `spare` are left."""
    return min(most, int(room * WINDOW_SHARE), spare)


def compose(
    facts: Sequence[ProfileFact],
    brief: Sequence[SummarySentence],
    known: set[str],
    room: int,
    spare: int,
    count: Count,
) -> Background:
    """As many facts, and sentences of `brief` from its first on, as fit. Left out are sentences of `known`
    turns, which the prompt holds anyway."""
    chosen_facts = _facts(facts, budget(PROFILE_TOKENS, room, spare), count)
    text = _section(PROFILE_HEADING, map(fact_line, chosen_facts))
    spare -= count(text) if text else 0
    chosen = _sentences(brief, known, budget(SUMMARY_TOKENS, room, spare), count)
    text += _section(SUMMARY_HEADING, map(sentence_line, chosen))
    return Background(text, tuple(chosen_facts), tuple(chosen))


def fact_line(fact: ProfileFact) -> str:
    since = f" (since {time.strftime('%Y-%m-%d', time.gmtime(fact.since))})" if fact.since < fact.written_at else ""
    return f"- {fact.key}: {fact.value}{since}\n"


def sentence_line(sentence: SummarySentence) -> str:
    speaker = f", {sentence.speaker}" if sentence.speaker else ""
    corrected = ", corrected" if sentence.corrected else ""
    return f"- [turn {sentence.number}{speaker}{corrected}] {sentence.text}\n"


def _facts(facts: Sequence[ProfileFact], left: int, count: Count) -> list[ProfileFact]:
    """The most important and the newest that fit, in the order in which they came."""
    left -= count(PROFILE_HEADING)
    places = sorted(
        range(len(facts)), key=lambda at: (facts[at].key not in _FIRST_KEYS, -facts[at].written_at, -at)
    )
    kept = set()
    for at in places:
        cost = count(fact_line(facts[at]))
        if cost <= left:
            kept.add(at)
            left -= cost
    return [fact for at, fact in enumerate(facts) if at in kept]


def _sentences(brief: Sequence[SummarySentence], known: set[str], left: int, count: Count) -> list[SummarySentence]:
    left -= count(SUMMARY_HEADING)
    said = "\n".join(known)
    chosen = []
    for sentence in brief:
        if left <= 0:
            break
        if not sentence.corrected and sentence.text in said:
            continue
        cost = count(sentence_line(sentence))
        if cost <= left:
            chosen.append(sentence)
            left -= cost
    return sorted(chosen, key=lambda each: (each.number, each.start))


def _section(heading: str, lines: Sequence[str] | map[str]) -> str:
    body = "".join(lines)
    return f"{heading}{body}\n" if body else ""
