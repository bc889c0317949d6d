"""Questions whose answers stand once in a long haystack of real text, and how the haystack is built.

A haystack holds many needles, so that one prefill serves many questions. Facts are drawn from a seed; no word is
key or value twice. A question is the beginning of its needle, so that small base models can answer it too: what is
tested is whether a needle is found, not whether an instruction is followed. Keys are two words, since models of
this size mix up needles that one common word tells apart, with full KV. Knows tokens through an `encode` function;
nothing of models, attention or scores.

    passkey     one fact of its kind (six kinds)
    multikey    a sentence and a row of a table, with eight keys each
    lookup      rows of a table
    distractor  pairs of keys that differ in one digit
    repeat      a sentence of random words, continued from its first half
    switch      a multikey question after another topic's needle: the facts asked for lie elsewhere
    aggregate   what was voted for most often
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
    "The pass key is the",
    "The rocket's launch code is the",
    "My locker opens with the",
    "The invoice was paid for the",
    "The ship in the painting carries a",
    "The museum's oldest piece is the",
)
_SENTENCES = (("The {} means", "."), ("| {} |", " |"))
_KEYS, _ROWS, _PAIRS, _LISTS, _SWITCHES = 8, 4, 2, 4, 6
_LIST_KNOWN, _LIST_ASKED, _LIST_AFTER = 3, 2, 3
_POLLS = (
    ("One vote for {}.", ("red", "blue", "green", "yellow")),
    ("The jury picked the {}.", ("lion", "horse", "duck", "snake")),
    ("Sold: one {}.", ("apple", "banana", "cherry", "melon")),
)
_MAJORITY = 7  # votes for the winner; one for each of the others
_WORDS = """
river copper window sister market thunder pepper candle forest silver basket monkey carpet winter orange rocket
button ticket mirror pencil flower dragon bottle lemon tiger castle school guitar planet shadow blanket doctor
summer anchor beetle canyon dolphin engine falcon garden harbor island jacket kettle ladder meadow needle oven
parrot quarry ribbon saddle tunnel umbrella valley wagon violin barrel camera desert eagle feather glacier
hammer jungle kitchen lantern magnet orchard pillow rabbit spoon temple turtle vase walnut whistle zebra bridge
cactus drum fountain helmet apple bread cheese butter sugar honey coffee onion potato tomato carrot corn rice
salt soup cake milk water wine piano trumpet paper letter stamp coin jewel crown sword shield arrow knife fork
plate bowl chair table door roof wall floor stone brick wood iron gold glass cotton silk wool leather horse cow
sheep goat pig dog cat mouse lion bear wolf fox deer snake frog fish shark whale duck goose chicken bird bee ant
spider butterfly train truck ship boat plane bicycle wheel road street hotel hospital church museum library
theater prison palace tower farm factory office beach ocean lake mountain hill cave moon star sun cloud rain
snow wind storm fire ice king queen prince soldier farmer teacher pilot nurse painter singer writer actor judge
priest thief baker tailor hunter sailor
"""


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
    """`stem`, a value and `end` stand in the haystack; the stem is the question."""

    task: Task
    stem: str
    value: str
    end: str = "."

    @property
    def text(self) -> str:
        return f"\n{self.stem} {self.value}{self.end}\n"


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
    needles = list(_needles(rng))
    polls = [_poll(rng, form, options) for form, options in _POLLS]
    votes = [encode(f"\n{line}\n") for poll in polls for line in poll.lines()]
    coded = [(needle, encode(needle.text)) for needle in needles]
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
    questions = [*_questions(rng, encode, placed), *(poll.question(encode) for poll in polls)]
    return Haystack(tuple(out), tuple(questions))


def _needles(rng: random.Random) -> Iterator[_Needle]:
    words = iter(rng.sample(_WORDS.split(), _WORDS.count(" ")))

    def key() -> str:
        return f"{next(words)} {next(words)}"

    def needle(task: Task, stem: str, end: str = ".") -> _Needle:
        return _Needle(task, stem, next(words), end)

    yield from (needle("passkey", stem) for stem in _PASSKEYS)
    for sentence, end in _SENTENCES:
        yield from (needle("multikey", sentence.format(key()), end) for _ in range(_KEYS))
    yield from (needle("lookup", f"| {key()} {number} |", " |") for number in rng.sample(range(100, 1000), _ROWS))
    for _ in range(_PAIRS):
        shared, digits = key(), rng.sample(range(1, 10), 2)
        yield from (needle("distractor", f"Door {digit} of the {shared} hides the") for digit in digits)
    for _ in range(_LISTS):
        known, asked, after = (
            " ".join(next(words) for _ in range(count)) for count in (_LIST_KNOWN, _LIST_ASKED, _LIST_AFTER)
        )
        yield _Needle("repeat", f"The sentence to repeat is: {known}", asked, f" {after}.")


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
    def asked(task: Task, needle: _Needle, place: Place, before: str = "") -> Question:
        prompt = encode(f"{before}\n{needle.stem}")
        return Question(task, place, tuple(prompt), tuple(encode(f" {needle.value}")))

    yield from (asked(needle.task, needle, place) for needle, place in placed)
    keys = [(needle, place) for needle, place in placed if needle.task == "multikey"]
    others = [needle.text for needle, _ in placed if needle.task in ("passkey", "repeat")]
    for needle, place in rng.sample(keys, _SWITCHES):
        yield asked("switch", needle, place, rng.choice(others))


@dataclass(frozen=True, slots=True)
class _Poll:
    """Votes whose evidence is spread over the whole haystack."""

    form: str
    winner: str
    others: tuple[str, ...]

    def lines(self) -> list[str]:
        return [self.form.format(option) for option in (*[self.winner] * _MAJORITY, *self.others)]

    def question(self, encode: Encode) -> Question:
        prompt, _ = self.form.split(" {}")
        return Question("aggregate", "middle", tuple(encode(f"\n{prompt}")), tuple(encode(f" {self.winner}")))


def _poll(rng: random.Random, form: str, options: Sequence[str]) -> _Poll:
    winner, *others = rng.sample(options, len(options))
    return _Poll(form, winner, tuple(others))
