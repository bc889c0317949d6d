"""Models that think aloud before they answer: which do, by their chat template, and where thoughts end.

Knows the marks around thoughts and text; doesn't know engines or dialects. A model that was trained to think writes
its thoughts between marks at the beginning of its answer (Qwen3, GLM, Magistral, Seed-OSS), or its template has
written the first mark already (DeepSeek-R1 and what was distilled from it, QwQ). Elsewhere in a text a mark is
text."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from typing import Any

from perilune.core import ChoiceFinished, CitationAdded, Event, Request, TextDelta, ToolMode
from perilune.errors import InvalidRequest
from perilune.service.ports import ChatTemplate

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
NO_THOUGHT = frozenset({"none", "minimal"})


@dataclass(frozen=True, slots=True)
class ThinkingStyle:
    """The marks of a model's thoughts. `opens`: its template has written the first one before the answer begins;
    `optional`: it can be told not to think."""

    begin: str
    end: str
    opens: bool = False
    optional: bool = False


def style_of(template: ChatTemplate | None, source: str) -> ThinkingStyle | None:
    """How a model thinks, told by its template; None for one that doesn't."""
    marks = next(((begin, end) for begin, end in MARKS if end in source), None)
    if template is None or marks is None:
        return None
    try:
        text = template.render([{"role": "user", "content": "Hello."}], add_generation_prompt=True)
    except InvalidRequest:
        text = ""
    opens = text.rstrip().endswith(marks[0])
    return ThinkingStyle(*marks, opens=opens, optional="enable_thinking" in source or "thinking" in _names(source))


def _names(source: str) -> list[str]:
    return [word.strip("()%{}") for word in source.split()]


def template_variables(effort: str | None) -> dict[str, Any]:
    """What a template is told of the effort, in the names that models' templates use; nothing for None."""
    if effort is None:
        return {}
    thinks = effort not in NO_THOUGHT
    return {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": effort}


def splitter_of(style: ThinkingStyle | None, request: Request) -> ThoughtSplitter | None:
    """What tells a request's thoughts from its answer; None where there are none. An answer of a given form has no
    thoughts before it, unless the form asks for the marks."""
    if style is None or request.prefix:  # what the answer begins with is said already
        return None
    formed = request.sampling.grammar is not None
    free = bool(request.tools.offered) and request.tools.mode is ToolMode.AUTO
    silenced = style.optional and request.effort in NO_THOUGHT
    return ThoughtSplitter(style, style.opens and not silenced and (free or not formed))


async def citations_last(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Events in which citations wait for the first text: they belong to what is said, and thoughts come before
    it."""
    waiting: list[Event] = []
    said = False
    async with aclosing(events):
        async for event in events:
            if isinstance(event, CitationAdded) and not said:
                waiting.append(event)
                continue
            if isinstance(event, TextDelta | ChoiceFinished) and not said:
                said = True
                for each in waiting:
                    yield each
            yield event


class _State(Enum):
    BEFORE = "before"  # it isn't known yet whether there are thoughts
    THINKING = "thinking"
    BETWEEN = "between"  # white space behind the thoughts
    SAYING = "saying"


class ThoughtSplitter:
    """The text of one answer, in pieces, as (thought, said). Linear; holds back what may be part of a mark."""

    def __init__(self, style: ThinkingStyle, opened: bool) -> None:
        self._style = style
        self._state = _State.THINKING if opened else _State.BEFORE
        self._held = ""
        self._blank = opened  # nothing was thought yet but white space

    @property
    def thinking(self) -> bool:
        return self._state is _State.THINKING

    @property
    def held_chars(self) -> int:
        """Of what was pushed: not known yet what it is."""
        return len(self._held)

    def push(self, text: str) -> tuple[str, str]:
        self._held += text
        thought = said = ""
        if self._state is _State.BEFORE:
            self._begin()
        if self._state is _State.THINKING:
            thought = self._think()
        if self._state is _State.BETWEEN:
            self._held = self._held.lstrip()
            self._state = _State.SAYING if self._held else _State.BETWEEN
        if self._state is _State.SAYING:
            said, self._held = self._held, ""
        return thought, said

    def flush(self) -> tuple[str, str]:
        """The rest, at the end: an answer that was cut while it thought has said nothing."""
        rest, self._held = self._held, ""
        return (rest, "") if self._state is _State.THINKING else ("", rest)

    def _begin(self) -> None:
        text, begin = self._held.lstrip(), self._style.begin
        if text.startswith(begin):
            self._held, self._state, self._blank = text[len(begin) :], _State.THINKING, True
        elif not begin.startswith(text):
            self._state = _State.SAYING

    def _think(self) -> str:
        at = self._held.find(self._style.end)
        if at >= 0:
            thought, self._held = self._held[:at].rstrip(), self._held[at + len(self._style.end) :]
            self._state = _State.BETWEEN
        else:
            keep = _kept(self._held, self._style.end)
            thought, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if self._blank:
            thought = thought.lstrip()
            self._blank = not thought
        return thought


def _kept(text: str, mark: str) -> int:
    """How many characters at the end may belong to white space before a mark, or to the mark."""
    size = next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
    body = text[: len(text) - size]
    return size + len(body) - len(body.rstrip())
