"""Effective length (spec R16): up to which length a model still answers from its context.

A text of each length gets a fact of each task at each depth; each is asked for, and counts as answered if greedy
decoding gives all of its tokens. The model reads everything exactly, in the bf16 arithmetic that serves prompts.
One prefill serves every question about a text. Knows models and tokens; nothing of files or printing.

    passkey  a sentence that gives the secret code of a city
    lookup   a line of JSON that gives the value of a key
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from perilune.core import BLOCK_TOKENS
from perilune.errors import InvalidRequest
from perilune.runtime.evaluate.kv_answers import ask
from perilune.runtime.evaluate.kv_forward import Context, EvalModel, FullReader, prefill
from perilune.runtime.evaluate.kv_tasks import Encode, Question, Task
from perilune.runtime.evaluate.length_record import Cell

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SHORTEST = 512
_CITIES = (
    *("Oslo", "Lima", "Cairo", "Hanoi", "Quito", "Dakar", "Turin", "Osaka", "Perth", "Sofia", "Tunis", "Kyoto"),
    *("Boston", "Dublin", "Madrid", "Zurich"),
)

Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Fact:
    """A needle: `text` stands in the haystack at `depth`; after `question`, `answer` must follow."""

    task: str
    depth: float
    text: str
    question: str
    answer: str


def facts(rng: random.Random, depths: Sequence[float] = DEPTHS) -> list[Fact]:
    """One of each task for each depth, no value or name twice."""
    values = iter(rng.sample(range(10000, 99999), 2 * len(depths)))
    cities, users = rng.sample(_CITIES, len(depths)), rng.sample(range(100, 999), len(depths))
    found = []
    for depth, city, user in zip(depths, cities, users, strict=True):
        stem, value = f"The secret code of {city} is", next(values)
        found.append(
            Fact("passkey", depth, f"{stem} {value}.", f"What is the secret code of {city}? {stem}", f" {value}")
        )
        key, value = f"user-{user}", next(values)
        found.append(Fact("lookup", depth, f'{{"{key}": "{value}"}}', f'Look up {key}.\n{{"{key}": "', f"{value}"))
    return found


def fits(encode: Encode, chosen: Sequence[Fact], length: int) -> bool:
    """Whether facts leave a third of `length` tokens or more to the text around them."""
    return sum(len(encode(f"\n{fact.text}\n")) for fact in chosen) <= length - length // 3


def haystack(
    encode: Encode, filler: Sequence[int], chosen: Sequence[Fact], length: int, rng: random.Random
) -> list[int]:
    """Exactly `length` tokens of `filler`, from a random place on, with each fact as near its depth as may be.

    Raises `InvalidRequest` for too little filler, ValueError for facts that don't fit.
    """
    coded = [(fact.depth, encode(f"\n{fact.text}\n")) for fact in sorted(chosen, key=lambda fact: fact.depth)]
    free = length - sum(len(ids) for _, ids in coded)
    if not fits(encode, chosen, length):
        raise ValueError(f"{length} tokens are too few for {len(chosen)} facts")
    if len(filler) < free:
        raise InvalidRequest(
            f"A text of {length:,} tokens needs {free:,} tokens of filler; there are {len(filler):,}.",
            hint="Give a longer text, or --max-length.",
        )
    begin = rng.randrange(len(filler) - free + 1)
    out: list[int] = []
    used = 0
    for depth, ids in coded:
        upto = round(depth * free)
        out += filler[begin + used : begin + upto]
        out += ids
        used = upto
    return out + list(filler[begin + used : begin + free])


def lengths_up_to(longest: int) -> tuple[int, ...]:
    """512, 1024 … and the longest itself. Raises `InvalidRequest` where not even the first fits."""
    if longest < SHORTEST:
        raise InvalidRequest(f"{longest} tokens are too few to measure a length.", hint=f"{SHORTEST} at least.")
    found = [SHORTEST]
    while 2 * found[-1] <= longest:
        found.append(2 * found[-1])
    return tuple(found) if longest - found[-1] < found[-1] // 4 else (*found, longest)


@torch.inference_mode()
def measure(
    model: EvalModel,
    encode: Encode,
    filler: Sequence[int],
    lengths: Sequence[int],
    *,
    trials: int,
    seed: int,
    limit_s: float,
    start: Sequence[int] = (),
    report: Report = lambda stage, done, total: None,
) -> list[Cell]:
    """The grid, shortest length first, each with `trials` texts of its own; `start` stands first (bos).

    After `limit_s` no text is begun any more. Lengths without a text, or without room for the facts, are absent.
    Raises `InvalidRequest` where that leaves nothing, or for too little filler.
    """
    began = time.monotonic()
    right: dict[tuple[str, int, float], list[bool]] = {}
    for length in lengths:
        for trial in range(trials):
            if time.monotonic() - began > limit_s and right:
                break
            rng = random.Random(f"{seed} {length} {trial}")
            chosen = facts(rng)
            questions = [_question(encode, fact) for fact in chosen]
            room = length - len(start) - max(len(asked.prompt) + len(asked.answer) for asked in questions)
            if not fits(encode, chosen, room):
                break
            text = [*start, *haystack(encode, filler, chosen, room, rng)]
            report(f"{length:,} tokens", trial, trials)
            for fact, answer in zip(chosen, _answers(model, text, questions), strict=True):
                right.setdefault((fact.task, length, fact.depth), []).append(answer)
    if not right:
        raise InvalidRequest(
            f"{max(lengths):,} tokens have no room for {2 * len(DEPTHS)} facts.", hint="Raise --max-length."
        )
    return [Cell(task, length, depth, sum(got), len(got)) for (task, length, depth), got in right.items()]


def _question(encode: Encode, fact: Fact) -> Question:
    task: Task = "passkey" if fact.task == "passkey" else "lookup"
    return Question(task, "middle", tuple(encode(f"\n\n{fact.question}")), tuple(encode(fact.answer)))


def _answers(model: EvalModel, text: Sequence[int], questions: Sequence[Question]) -> list[bool]:
    context = Context(model.weights.config, -(-len(text) // BLOCK_TOKENS) * BLOCK_TOKENS)
    for _ in prefill(model, torch.tensor(text), context):
        pass
    return ask(model, questions, context.length, FullReader(model, context))
