"""A grammar that wants minutes or gigabytes ends a process of its own, quickly, and the next one is served."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perilune.core import Grammar, GrammarKind
from perilune.errors import InvalidRequest, Overloaded
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.grammar import GrammarCompiler
from perilune.runtime.grammar_source import CannotFollow, Words
from perilune.runtime.grammar_trial import GrammarTrial
from perilune.runtime.tokenizer import load_tokenizer

# Compiling it in this process took 170 s and 4.5 GB.
BOMB = Grammar(
    GrammarKind.LARK, "start: X\nX: /(.*a.{18}.*)/ & /(.*b.{17}.*)/ & ~/(.*c.{15}.*)/", "structured_outputs.grammar"
)
GOOD = Grammar(GrammarKind.REGEX, "[a-z]+")
WORDS = Words([bytes([byte]) for byte in range(256)], [], [0], lambda text: list(text.encode()))


@pytest.fixture(scope="module")
def compiler(smollm2_path: Path) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(load_tokenizer(open_checkpoint(smollm2_path)))
    yield made
    made.close()


def test_a_bomb_is_refused_in_seconds_and_remembered(compiler: GrammarCompiler) -> None:
    compiler.constrain(GOOD)
    with pytest.raises(InvalidRequest, match="too much time or memory") as found:
        compiler.constrain(BOMB)
    assert found.value.param == "structured_outputs.grammar"
    began_s = time.monotonic()
    with pytest.raises(InvalidRequest):
        compiler.constrain(BOMB)
    assert time.monotonic() - began_s < 1
    compiler.constrain(Grammar(GrammarKind.REGEX, "[a-z]+0"))  # by a new process


def test_what_is_wrong_is_told_by_the_process() -> None:
    trial = GrammarTrial(WORDS)
    try:
        trial.check(GOOD)
        with pytest.raises(CannotFollow, match="closed"):
            trial.check(Grammar(GrammarKind.REGEX, "(unclosed"))
    finally:
        trial.close()


@pytest.mark.parametrize(
    "program", ["raise SystemExit", "input(); raise SystemExit", "import time; time.sleep(60)"]
)
def test_a_process_that_doesnt_start_is_told(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.runtime.grammar_trial.START_S", 2.0)
    trial = GrammarTrial(WORDS, (sys.executable, "-c", program))
    with pytest.raises(Overloaded):
        trial.check(GOOD)
    trial.close()


SLOW = """
import json, sys, time
print("{}", flush=True) if input() else None
for line in sys.stdin:
    time.sleep(30 if "slow" in line else 0)
    print(json.dumps({"error": None}), flush=True)
"""


def test_one_that_hangs_is_killed_and_others_dont_wait_for_ever() -> None:
    trial = GrammarTrial(WORDS, (sys.executable, "-c", SLOW), wait_s=2.0)
    trial.check(GOOD)
    refused: list[Exception] = []

    def ask() -> None:
        try:
            trial.check(Grammar(GrammarKind.REGEX, "slow"))
        except CannotFollow as error:
            refused.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(20)
    assert len(refused) == 1
    trial.check(Grammar(GrammarKind.REGEX, "quick"))
    trial.close()
