"""Calls are read out of text the same however it is cut, and what is no call stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perilune.core import ToolCall
from perilune.service.tools.formats import Hermes, Llama3, ToolFormat
from perilune.service.tools.parse import CallBegan, CallParser, CallWrote, Said

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=6) | st.just('}"]{<tool_call>\\'),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), JSON, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(["look_up", "f-2"]), ARGUMENTS), max_size=3)


def read(notation: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """(text, calls) of an answer that arrives in pieces."""
    parser = CallParser(notation)
    said: list[str] = []
    calls: list[list[str]] = []
    for found in [item for piece in pieces for item in parser.push(piece)] + list(parser.flush()):
        match found:
            case Said(text):
                said.append(text)
            case CallBegan(index, name):
                assert index == len(calls)
                calls.append([name, ""])
            case CallWrote(index, text):
                calls[index][1] += text
    return "".join(said), [(name, arguments) for name, arguments in calls]


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


@example("<tool_call>", [("look_up", {})], [])
@example("<tool_call> a", [("look_up", {}), ("f-2", {"a": 1})], [3, 9, 1])
@given(st.text("ab <tol_c>\n", max_size=20), CALLS, st.lists(st.integers(1, 9), max_size=30))
def test_hermes_calls_behind_text(said: str, calls: list[tuple[str, dict[str, object]]], sizes: list[int]) -> None:
    notation = Hermes()
    made = [ToolCall("c", name, json.dumps(arguments)) for name, arguments in calls]
    text = said + "\n".join(notation.call(call) for call in made)
    shown, found = read(notation, cut(text, sizes))
    assert found == [(call.name, call.arguments) for call in made]
    assert shown == (said.rstrip() if made else said)


@given(ARGUMENTS, st.lists(st.integers(1, 9), max_size=30))
def test_llama_calls_stand_alone(arguments: dict[str, object], sizes: list[int]) -> None:
    call = ToolCall("c", "look_up", json.dumps(arguments))
    assert read(Llama3(), cut(Llama3().call(call), sizes)) == ("", [(call.name, call.arguments)])


@given(st.text(max_size=60), st.lists(st.integers(1, 9), max_size=30))
def test_text_without_calls_stays(text: str, sizes: list[int]) -> None:
    shown, calls = read(Llama3(), cut("It is " + text, sizes))
    assert (shown, calls) == ("It is " + text, [])


@pytest.mark.parametrize(
    "text",
    ["<tool_call>", "<tool_call>never mind", '<tool_call>\n{"name": 3}', "<tool_ca", "<tool_call>" + "x" * 2000],
)
def test_what_only_looks_like_a_call_is_text(text: str) -> None:
    assert read(Hermes(), [text]) == (text, [])
    assert read(Hermes(), list(text)) == (text, [])


def test_a_call_that_is_cut_off_keeps_what_it_wrote() -> None:
    assert read(Hermes(), ['<tool_call>\n{"name": "f", "arguments": {"a": "b']) == ("", [("f", '{"a": "b')])
