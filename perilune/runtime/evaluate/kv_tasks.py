"""Questions whose answers stand once in a long haystack of real text, and how the haystack is built.

A haystack holds many needles, so that one prefill serves many questions. Facts are drawn from a seed. Knows tokens
through an `encode` function; nothing of models, attention or scores.

    passkey     one fact of its kind (six kinds)
    multikey    the same sentence with twenty keys
    lookup      lines of JSON, a value by its key
    distractor  keys that differ from another one in one digit
    repeat      a sentence of random words, continued from its first half
    switch      a multikey question after another topic's question and answer: the facts asked for lie elsewhere
    aggregate   the colour most often voted for
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Task = Literal["passkey", "multikey", "lookup", "distractor", "repeat", "switch", "aggregate"]
Place = Literal["cold", "border", "middle", "late"]
Encode = Callable[[str], list[int]]

_PASSKEYS = (
    ("The pass key is {}. Remember it: {} is the pass key.", "What is the pass key?", "The pass key is"),
    ("The launch code of the rocket is {}.", "Can we start?", "The launch code of the rocket is"),
    ("My locker combination is {}.", "How do I open my locker?", "My locker combination is"),
    ("The invoice total was {} dollars.", "What do we owe?", "The invoice total was"),
    ("The ship's registration number is {}.", "Which ship is it?", "The ship's registration number is"),
    ("The museum's telephone extension is {}.", "How do I call?", "The museum's telephone extension is"),
)
_ADJECTIVES = (
    "amber",
    "brave",
    "calm",
    "dusty",
    "eager",
    "fancy",
    "gentle",
    "hollow",
    "icy",
    "jolly",
    "kind",
    "odd",
)
_NOUNS = (
    "anchor",
    "beetle",
    "canyon",
    "dolphin",
    "engine",
    "falcon",
    "garden",
    "harbor",
    "island",
    "jacket",
    "kettle",
)
_WORDS = (
    *("river", "copper", "window", "sister", "market", "thunder", "pepper", "candle", "forest", "silver", "basket"),
    *("monkey", "carpet", "winter", "orange", "rocket", "button", "ticket", "mirror", "pencil", "flower", "dragon"),
    *("bottle", "lemon", "tiger", "castle", "school", "guitar", "planet", "shadow", "blanket", "doctor", "summer"),
)
_COLOURS = ("red", "blue", "green", "yellow", "purple")


@dataclass(frozen=True, slots=True)
class Question:
    """`prompt` follows the haystack; `answer` is what must come next, token by token."""

    task: Task
    place: Place
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Haystack:
    """`token_ids` with its needles in place, and the questions about them."""

    token_ids: tuple[int, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class _Needle:
    task: Task
    text: str
    question: str
    answer: str


def build_haystack(
    encode: Encode,
    filler: Sequence[int],
    *,
    length: int,
    segment_tokens: int,
    seed: int,
    start: Sequence[int] = (),
) -> Haystack:
    """A haystack of exactly `length` tokens. `filler` are real text's tokens; `start` stands first (bos).

    A needle straddles every multiple of `segment_tokens`. Raises ValueError where the
    filler is too short or the needles don't fit.
    """
    rng = random.Random(seed)
    needles = _needles(rng)
    colours = _votes(rng)
    votes = [encode(f"\nOne vote for {colour}.\n") for colour in colours]
    coded = [(needle, encode(f"\n{needle.text}\n")) for needle in needles]
    if sum(len(ids) for _, ids in coded) + sum(map(len, votes)) > length // 2:
        raise ValueError(f"a haystack of {length} tokens is too short for its needles")
    if len(filler) < length:
        raise ValueError(f"{length} tokens of text are needed, there are {len(filler)}")
    begin = rng.randrange(len(filler) - length + 1)
    text = iter(filler[begin : begin + length])
    out, placed = list(start), []
    borders = list(range(segment_tokens, length - 200, segment_tokens))
    rng.shuffle(coded)
    at_borders, rest = coded[: len(borders)], [*coded[len(borders) :], *((None, vote) for vote in votes)]
    rng.shuffle(rest)
    middles = [*borders, *_spread(rng, length, borders, len(rest))]
    for middle, (needle, ids) in sorted(zip(middles, [*at_borders, *rest], strict=True), key=lambda pair: pair[0]):
        while len(out) < middle - len(ids) // 2:
            out.append(next(text))
        if needle is not None:
            placed.append((needle, _place(len(out), len(ids), length, segment_tokens)))
        out.extend(ids)
    while len(out) < length:
        out.append(next(text))
    if len(out) > length:
        raise ValueError("the needles don't fit")
    questions = [*_questions(rng, encode, placed), _aggregate(encode, colours[0])]
    return Haystack(tuple(out), tuple(questions))


def _needles(rng: random.Random) -> list[_Needle]:
    found = []
    numbers = iter(rng.sample(range(10000, 99999), 80))
    for text, question, stem in _PASSKEYS:
        value = str(next(numbers))
        found.append(_Needle("passkey", text.format(value, value), f"{question} {stem}", f" {value}"))
    pairs = rng.sample([f"{a}-{n}" for a in _ADJECTIVES for n in _NOUNS], 20)
    for pair in pairs:
        value = str(next(numbers))
        stem = f"The special number of the {pair} is"
        found.append(
            _Needle(
                "multikey", f"{stem} {value}.", f"What is the special number of the {pair}? {stem}", f" {value}"
            )
        )
    for name in rng.sample(range(100, 999), 10):
        value = str(next(numbers))
        found.append(
            _Needle("lookup", f'{{"user-{name}": "{value}"}}', f'Look up user-{name}.\n{{"user-{name}": "', value)
        )
    for room in rng.sample(range(1000, 9990, 10), 5):
        for number in (room + 3, room + 4):
            value = str(next(numbers))
            stem = f"The code of room {number} is"
            found.append(
                _Needle("distractor", f"{stem} {value}.", f"What is the code of room {number}? {stem}", f" {value}")
            )
    for _ in range(8):
        words = rng.sample(_WORDS, 10)
        text = "The sentence to repeat is: " + " ".join(words)
        found.append(
            _Needle(
                "repeat", text + ".", "The sentence to repeat is: " + " ".join(words[:5]), " " + " ".join(words[5:])
            )
        )
    return found


def _votes(rng: random.Random) -> list[str]:
    winner, *others = rng.sample(_COLOURS, 4)
    return [winner] * 7 + others


def _spread(rng: random.Random, length: int, borders: list[int], count: int) -> list[int]:
    """Middles of needles that stand at no border: evenly over the haystack, with jitter, clear of the borders."""
    step = (length - 300) / count
    spots = [round(60 + step * (index + 0.2 + 0.3 * rng.random())) for index in range(count)]
    return [spot + (50 if any(abs(spot - border) < 50 for border in borders) else 0) for spot in spots]


def _place(at: int, size: int, length: int, segment_tokens: int) -> Place:
    if at // segment_tokens != (at + size - 1) // segment_tokens:
        return "border"
    if at < length // 3:
        return "cold"
    return "middle" if at < 2 * length // 3 else "late"


def _questions(rng: random.Random, encode: Encode, placed: Sequence[tuple[_Needle, Place]]) -> Iterator[Question]:
    for needle, place in placed:
        prompt = f"\n\n{needle.question}"
        yield Question(needle.task, place, tuple(encode(prompt)), tuple(encode(needle.answer)))
    keys = [(needle, place) for needle, place in placed if needle.task == "multikey"]
    others = [needle for needle, _ in placed if needle.task in ("passkey", "repeat")]
    for needle, place in rng.sample(keys, 8):
        before = rng.choice(others)
        prompt = f"\n\n{before.question}{before.answer}.\n\nNow something else. {needle.question}"
        yield Question("switch", place, tuple(encode(prompt)), tuple(encode(needle.answer)))


def _aggregate(encode: Encode, winner: str) -> Question:
    """Which colour had the most votes; its evidence is spread over the whole haystack."""
    prompt = "\n\nWhich colour had the most votes? Most votes were for"
    return Question("aggregate", "middle", tuple(encode(prompt)), tuple(encode(f" {winner}")))
