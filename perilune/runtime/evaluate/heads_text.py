"""Calibration text for `eval heads`: facts hidden in a long text, none of them like those that `eval kv` asks for.

A profile of heads must not be measured on what it is judged by: other words, other sentences, another text. Knows
tokens through an `encode` function; nothing of models or attention.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perilune.runtime.evaluate.kv_tasks import Encode, Haystack, Question
from perilune.runtime.evaluate.text import EvalText

_NAMES = """
Alice Boris Carla Dmitri Elena Fatima George Hanna Igor Julia Karim Laura Mateo Nadia Oscar Paula Quentin Rosa
Stefan Tanya Umberto Vera Walter Xenia Yusuf Zelda Bruno Clara Diego Esther Felix Greta Henri Irene Jonas Kiran
Leila Marco Nora Otto
"""
_PLACES = """
Paris London Berlin Madrid Rome Vienna Lisbon Dublin Athens Oslo Moscow Cairo Tokyo Delhi Beijing Sydney Toronto
Boston Chicago Denver Seattle Houston Miami Dallas Atlanta Phoenix Portland Austin Detroit Memphis Warsaw Prague
Budapest Geneva Hamburg Munich Milan Venice Naples Turin
"""
_WORDS = """
quiet bright heavy narrow gentle bitter ancient clever dusty eager fancy greedy hollow icy jolly kind lazy modern
noble odd proud rapid salty tender urgent vivid warm young brave calm deep early fresh grand harsh ideal loyal mild
neat plain
"""
_THINGS = """
budget meeting report contract garage balcony fence engine invoice curtain statue antenna ballot catalog diploma
elevator freezer gallery helicopter interview journal keyboard lecture museum notebook orchestra package recipe
schedule telescope uniform vaccine warehouse yacht archive blueprint compass debate easel fabric
"""
_SPARE_TOKENS = 200  # at the end, behind the last fact


@dataclass(frozen=True, slots=True)
class _Fact:
    stem: str
    value: str
    end: str


def calibration_text() -> EvalText:
    """Sources of Python's standard library: prose and code, the same for everyone with the same Python."""
    import argparse
    import difflib
    import doctest
    import imaplib
    import logging
    import optparse
    import statistics
    import subprocess
    import tarfile
    import turtle

    modules = (turtle, statistics, difflib, doctest, optparse, argparse, subprocess, logging, tarfile, imaplib)
    return EvalText("sources of Python's library", "\n\n".join(map(inspect.getsource, modules)))


def calibration_haystack(
    encode: Encode, filler: Sequence[int], *, length: int, seed: int, start: Sequence[int] = ()
) -> Haystack:
    """A haystack of exactly `length` tokens with 32 facts, each asked for once by its beginning.

    Raises ValueError where the filler is too short or the facts don't fit.
    """
    rng = random.Random(seed)
    facts = list(_facts(rng))
    rng.shuffle(facts)
    coded = [encode(f"\n{fact.stem} {fact.value}{fact.end}\n") for fact in facts]
    room = length - len(start) - sum(map(len, coded))
    if room < length // 2 or len(filler) < room:
        raise ValueError(f"{length} tokens are too short for the facts, or {len(filler)} of text for {length}")
    begin = rng.randrange(len(filler) - room + 1)
    text, step, taken = filler[begin : begin + room], (room - _SPARE_TOKENS) // len(facts), 0
    out = list(start)
    for ids in coded:
        count = min(int(step * (0.6 + 0.8 * rng.random())), room - taken)
        out += text[taken : taken + count]
        taken += count
        out += ids
    out += text[taken:]
    questions = [
        Question("lookup", "middle", tuple(encode(f"\n{fact.stem}")), tuple(encode(f" {fact.value}")))
        for fact in facts
    ]
    return Haystack(tuple(out), tuple(questions))


def _facts(rng: random.Random) -> Iterator[_Fact]:
    """No word stands in two facts."""
    names, places, words, things = (
        iter(rng.sample(pool.split(), len(pool.split()))) for pool in (_NAMES, _PLACES, _WORDS, _THINGS)
    )
    yield from (_Fact(f"{next(names)} and {next(names)} live in", next(places), ".") for _ in range(8))
    yield from (_Fact(f"The {next(things)} of {next(names)} was", next(words), ".") for _ in range(8))
    yield from (_Fact(f"set_{next(things)}_{next(words)} =", next(things), ";") for _ in range(6))
    yield from (_Fact(f"{next(words)} {next(things)} ->", next(places), "") for _ in range(6))
    for _ in range(4):
        known, value = (f"{next(words)} {next(things)}" for _ in range(2))
        yield _Fact(f'"{next(names)} said: {known}', value, '."')
