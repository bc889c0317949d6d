"""Thoughts apart from answers: the splitter on any pieces, styles by template, the decoder's stops and log
probabilities."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.core import Grammar, GrammarKind, Request, SamplingParams, TokenLogprob, Tool, Tools
from perilune.runtime.chat_template import JinjaChatTemplate
from perilune.service.output import ChoiceDecoder
from perilune.service.thinking import ThinkingStyle, ThoughtSplitter, splitter_of, style_of, template_variables

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}"
)
R1 = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}<assistant><think>\n"
STYLE = ThinkingStyle("<think>", "</think>")


def split(pieces: list[str], opened: bool = False, style: ThinkingStyle = STYLE) -> tuple[str, str]:
    splitter = ThoughtSplitter(style, opened)
    found = [*(splitter.push(piece) for piece in pieces), splitter.flush()]
    return "".join(thought for thought, _ in found), "".join(said for _, said in found)


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(at)]


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nLet me see.\n</think>\n\nYes.", False, ("Let me see.", "Yes.")),
        ("\n<think>a < b</think>Yes", False, ("a < b", "Yes")),
        ("Let me see.\n</think>\n\nYes.", True, ("Let me see.", "Yes.")),
        ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
        ("Yes, <think> is a mark.", False, ("", "Yes, <think> is a mark.")),
        ("<thinker>", False, ("", "<thinker>")),
        ("<think>cut off </thi", False, ("cut off </thi", "")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
        ("<thi", False, ("", "<thi")),
        ("", True, ("", "")),
    ],
)
def test_thoughts_and_answers(text: str, opened: bool, expected: tuple[str, str]) -> None:
    for pieces in ([text], list(text)):
        assert split(pieces, opened) == expected


@given(st.text("<think>/ \nab", max_size=60), st.lists(st.integers(0, 60)), st.booleans())
def test_pieces_change_nothing(text: str, places: list[int], opened: bool) -> None:
    assert split(cut(text, places), opened) == split([text], opened)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (QWEN, ThinkingStyle("<think>", "</think>", opens=False, optional=True)),
        (R1, ThinkingStyle("<think>", "</think>", opens=True, optional=False)),
        ("{{ messages[0].content }}[THINK] [/THINK]", ThinkingStyle("[THINK]", "[/THINK]")),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
    ],
)
def test_styles_are_told_by_templates(source: str, expected: ThinkingStyle | None) -> None:
    assert style_of(JinjaChatTemplate(source), source) == expected
    assert style_of(None, source) is None


def test_the_template_is_told_the_effort() -> None:
    template = JinjaChatTemplate(QWEN)
    asked = [{"role": "user", "content": "Hi"}]
    assert template.render(asked, variables=template_variables("none")).endswith("</think>\n\n")
    assert not template.render(asked, variables=template_variables("high")).endswith("</think>\n\n")
    assert template.render(asked, variables=template_variables(None)) == template.render(asked)


def test_a_form_leaves_no_room_for_thoughts() -> None:
    opens = ThinkingStyle("<think>", "</think>", opens=True, optional=True)
    plain = Request("r", "t", "m", (), 0.0)
    formed = Request("r", "t", "m", (), 0.0, SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a")))
    tools = Request("r", "t", "m", (), 0.0, formed.sampling, tools=Tools((Tool("f"),)))
    silent = Request("r", "t", "m", (), 0.0, effort="none")
    found = [splitter_of(opens, request) for request in (plain, formed, tools, silent)]
    assert [splitter is not None and splitter.thinking for splitter in found] == [True, False, True, False]
    assert splitter_of(None, plain) is None


class Letters:
    """A tokenizer whose tokens are letters."""

    def stream(self) -> Letters:
        return self

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


def test_stops_and_log_probabilities_are_the_answers() -> None:
    decoder = ChoiceDecoder(Letters(), ("stop",), True, ThoughtSplitter(STYLE, False))  # type: ignore[arg-type]
    thought, said, told = "", "", ""
    for letter in "<think>a stop</think>\nYes. stop here":
        text, logprobs = decoder.push(ord(letter), TokenLogprob(ord(letter), -1.0))
        thought, said, told = (
            thought + decoder.thought(),
            said + text,
            told + "".join(each.token for each in logprobs),
        )
        if decoder.stopped:
            break
    assert (thought, said, told) == ("a stop", "Yes. ", "Yes. ")
