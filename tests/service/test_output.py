"""Stop strings and log probabilities across token borders."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perilune.core import TokenLogprob
from perilune.service.output import ChoiceDecoder, StopScanner
from tests.service.fakes import CharTokenizer

few = st.text("ab\n", max_size=40)
stops = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3).map(tuple)


@given(few, stops, st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_output_is_the_text_before_the_first_stop_string(text: str, stop: tuple[str, ...], cuts: list[int]) -> None:
    scanner = StopScanner(stop)
    shown, at, completed = "", 0, len(text)
    for index in range(len(text)):  # the stop string that completes first wins
        if any(text[: index + 1].endswith(s) for s in stop):
            completed = index + 1
            break
    for size in cuts * (len(text) // sum(cuts) + 1):
        shown += scanner.push(text[at : at + size])
        assert not any(s in shown for s in stop)
        at += size
    shown += scanner.flush()
    found = [text.find(s) for s in stop if s in text]
    if not found:
        assert shown == text
    else:
        assert scanner.stopped
        assert text.startswith(shown)
        assert not any(s in shown for s in stop)
        assert len(shown) < completed + max(cuts)


@given(few, stops)
def test_text_that_can_not_be_a_stop_string_is_not_held(text: str, stop: tuple[str, ...]) -> None:
    scanner = StopScanner(stop)
    shown = "".join(scanner.push(char) for char in text)
    if not scanner.stopped:
        held = text[len(shown) :]
        assert held == "" or any(s.startswith(held) for s in stop)


def run(text: str, stop: tuple[str, ...]) -> tuple[str, list[str]]:
    decoder = ChoiceDecoder(CharTokenizer(), stop, want_logprobs=True)
    shown, spelled = "", []
    for char in text:
        part, logprobs = decoder.push(ord(char), TokenLogprob(ord(char), -0.1, ((ord(char), -0.1), (66, -2.0))))
        shown += part
        spelled += [item.token for item in logprobs]
        if decoder.stopped:
            break
    part, logprobs = decoder.flush()
    return shown + part, spelled + [item.token for item in logprobs]


def test_logprobs_belong_to_shown_tokens_only() -> None:
    assert run("yes. END more", ("END",)) == ("yes. ", list("yes. "))
    assert run("yes. EN", ("END",)) == ("yes. EN", list("yes. EN"))


def test_logprobs_are_spelled_with_their_bytes() -> None:
    decoder = ChoiceDecoder(CharTokenizer(), (), want_logprobs=True)
    _, (item,) = decoder.push(ord("é"), TokenLogprob(ord("é"), -0.25, ((ord("e"), -1.5),)))
    assert (item.token, item.raw, item.logprob) == ("é", "é".encode(), -0.25)
    assert item.top == (("e", b"e", -1.5),)


def test_no_logprobs_unless_asked() -> None:
    decoder = ChoiceDecoder(CharTokenizer(), (), want_logprobs=False)
    assert decoder.push(ord("a"), TokenLogprob(ord("a"), -0.25)) == ("a", ())
