"""Effective length: texts have their facts where they should, the line is drawn right, and what is kept is read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.errors import InvalidRequest
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.evaluate import length_record
from perilune.runtime.evaluate.length import DEPTHS, facts, haystack, lengths_up_to, measure
from perilune.runtime.evaluate.length_record import Cell, EffectiveLength, judge
from perilune.runtime.evaluate.weights import eval_model
from tests.runtime.families import make_model

FILLER = [7] * 5000


def encode(text: str) -> list[int]:
    """Bytes as tokens, none of which is the filler's."""
    return [20 + byte for byte in text.encode()]


@given(st.integers(0, 10_000), st.integers(1100, 4000))
def test_facts_lie_at_their_depths(seed: int, length: int) -> None:
    rng = random.Random(seed)
    chosen = facts(rng)
    text = haystack(encode, FILLER, chosen, length, rng)
    assert len(text) == length
    said = "".join(chr(token - 20) if token != 7 else "·" for token in text)
    for fact in chosen:
        assert said.count(fact.text) == 1
        before = said[: said.index(fact.text)].count("·") / said.count("·")
        assert abs(before - fact.depth) < 0.01
        assert fact.text.endswith((f"{fact.answer}.", f'{fact.answer}"}}'))
    assert len({fact.answer.strip() for fact in chosen}) == len(chosen) == 2 * len(DEPTHS)


def test_texts_that_can_not_be_built_are_refused() -> None:
    chosen = facts(random.Random(0))
    with pytest.raises(ValueError, match="too few"):
        haystack(encode, FILLER, chosen, 400, random.Random(0))
    with pytest.raises(InvalidRequest, match="filler"):
        haystack(encode, FILLER[:100], chosen, 2000, random.Random(0))


def test_lengths_double_up_to_the_window() -> None:
    assert lengths_up_to(8192) == (512, 1024, 2048, 4096, 8192)
    assert lengths_up_to(3000) == (512, 1024, 2048, 3000)
    assert lengths_up_to(2100) == (512, 1024, 2048), "two lengths that are almost one"
    with pytest.raises(InvalidRequest):
        lengths_up_to(100)


def cells(**shares: tuple[int, ...]) -> list[Cell]:
    """Right answers of ten by task, for 512, 1,024 …"""
    return [
        Cell(task, 512 << index, 0.5, right, 10) for task, row in shares.items() for index, right in enumerate(row)
    ]


@pytest.mark.parametrize(
    ("grid", "tokens", "fails_at"),
    [
        ({"passkey": (10, 10, 9), "lookup": (10, 9, 9)}, 2048, None),
        ({"passkey": (10, 10, 2), "lookup": (10, 9, 1)}, 1024, 2048),
        ({"passkey": (10, 3, 10)}, 512, 1024),
        ({"passkey": (10, 10, 10), "lookup": (2, 0, 0)}, 2048, None),
        ({"passkey": (4, 4, 4)}, 0, None),
    ],
    ids=["never fails", "fails", "one gap ends it", "a task it can't do says nothing", "can do nothing"],
)
def test_the_line(grid: dict[str, tuple[int, ...]], tokens: int, fails_at: int | None) -> None:
    found = judge("m", cells(**grid))
    assert (found.tokens, found.fails_at) == (tokens, fails_at)


def test_what_was_measured_is_read_again(tmp_path: Path) -> None:
    found = judge("m", cells(passkey=(10, 2)))
    file = length_record.save(tmp_path, "f" * 64, found)
    assert length_record.read(tmp_path, "f" * 64) == found
    assert length_record.read(tmp_path, "e" * 64) is None
    assert [item.name for item in file.parent.iterdir()] == [file.name]
    for damage in ("{", "{}", '{"model": "m", "cells": [{"task": 1}]}', '{"model": "m", "cells": 3}'):
        file.write_text(damage)
        assert length_record.read(tmp_path, "f" * 64) is None


def test_a_model_is_asked_at_every_length_and_depth(tmp_path: Path) -> None:
    """A random model answers nothing; the grid is complete, and the time limit ends it at a length."""
    make_model("llama-untied", tmp_path)
    model = eval_model(open_checkpoint(tmp_path), "bf16", 512)

    def small(text: str) -> list[int]:
        return [3 + ord(character) % 300 for character in text[:6]]

    found = measure(model, small, FILLER, (256, 400), trials=2, seed=1, limit_s=1e6)
    assert {(cell.task, cell.length, cell.depth) for cell in found} == {
        (task, length, depth) for task in ("passkey", "lookup") for length in (256, 400) for depth in DEPTHS
    }
    assert {cell.asked for cell in found} == {2}
    assert sum(cell.right for cell in found) <= 2
    assert isinstance(judge("m", found), EffectiveLength)
    short = measure(model, small, FILLER, (256, 400), trials=2, seed=1, limit_s=0)
    assert {(cell.length, cell.asked) for cell in short} == {(256, 1)}
