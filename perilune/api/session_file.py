"""A session as a file to be saved: Markdown for people, JSON for programs.

Knows the wire's own shape of a session (`sessions.session_dict` with its turns) and nothing behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

_SPEAKERS = {"user": "You", "assistant": "Perilune"}
_ENDS = {"cancelled": "stopped", "error": "failed", "length": "cut off at its longest"}

Session = Mapping[str, Any]


def as_markdown(session: Session) -> bytes:
    """Every turn under its speaker and time, an answer with its plan, times and sources."""
    parts = [f"# {_line(session['title'] or session['id'])}"]
    for turn in session["data"]:
        parts.append(
            f"## {turn['turn']}. {_line(_SPEAKERS.get(turn['speaker'], turn['speaker']))}, {_time(turn['at'])}"
        )
        parts.append(turn["text"])
        if turn["answer"] is not None:
            parts += _card(turn["answer"])
    return ("\n\n".join(parts) + "\n").encode()


def as_json(session: Session) -> bytes:
    return orjson.dumps(session, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


EXPORTS: Mapping[str, tuple[str, str, Callable[[Session], bytes]]] = {
    "markdown": (".md", "text/markdown", as_markdown),
    "json": (".json", "application/json", as_json),
}
"""Form -> (suffix, media type, what writes it)."""


def _card(answer: Mapping[str, Any]) -> list[str]:
    facts = []
    if answer.get("plan"):
        facts.append(f"plan {answer['plan']}")
    if answer.get("measured_ttft_s") is not None:
        facts.append(f"first word after {answer['measured_ttft_s']:.1f} s of {answer['deadline_s']:g} s")
    if tokens := answer.get("tokens"):
        facts.append(
            f"{tokens['exact']:,} of {tokens['offered']:,} tokens read exactly, {tokens['dropped']:,} left out"
        )
    if answer["finish_reason"] in _ENDS:
        facts.append(_ENDS[answer["finish_reason"]])
    sources = [_source(each) for each in answer.get("citations", ())]
    return [each for each in (f"*{'; '.join(facts)}*" if facts else "", "\n".join(sources)) if each]


def _source(citation: Mapping[str, Any]) -> str:
    if citation.get("gone"):
        return "- (deleted since)"
    if "session" in citation:
        where = f"turn {citation['turn']}"
    else:
        where = f"{citation['filename']}, {citation['anchor'] or 'page ' + str(citation['page'])}"
    return f"- {_line(where)}: “{_line(citation['quote'])}”"


def _line(text: str) -> str:
    return " ".join(text.split())


def _time(at: float | None) -> str:
    return "at an unknown time" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
