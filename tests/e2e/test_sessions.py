"""A long conversation over the real server and model: the client sends its last messages, memory brings others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.e2e.conftest import MODEL, Server

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "perilune-object.schema.json").read_text("utf-8"))
FACT = "By the way, my locker at the Brill station has the number 4471."
SMALL_TALK = ("The weather is fair.", "I like tea.", "My train was late.", "The soup was hot.", "Geese are loud.")
EXCHANGES = 15  # of two turns each, behind the fact

pytestmark = pytest.mark.timeout(600)  # two busy cores have taken a minute to start a server


def ask(server: Server, messages: list[dict[str, str]], tokens: int = 4, **more: Any) -> Any:
    return server.client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=tokens,
        temperature=0,
        extra_body={"session": "e2e", **more},
    )


def test_a_fact_of_turn_3_is_in_the_prompt_30_turns_later(server: Server) -> None:
    said: list[dict[str, str]] = []
    talk = ["Good morning.", FACT, *(f"{SMALL_TALK[at % 5]} That is remark {at}." for at in range(EXCHANGES))]
    for text in talk:
        said.append({"role": "user", "content": text})
        answer = ask(server, said[-1:], session_scope="none")
        said.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
    question = {"role": "user", "content": "What is the number of my locker at the station?"}
    without = ask(server, [said[-1], question], tokens=24, session_scope="none", session="else")
    assert "4471" not in (without.choices[0].message.content or "")
    answer = ask(server, [said[-1], question], tokens=24)
    report = answer.model_extra["perilune"]
    jsonschema.validate(report, SCHEMA)
    cited = {item["turn"]: item for item in report["citations"]}
    assert (cited[3]["session"], cited[3]["speaker"], cited[3]["quote"]) == ("e2e", "user", FACT)
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens + 20
    # What so small a model makes of it differs from minute to minute; tests/service reads the prompt itself.

    shown = json.loads(server.cli("sessions", "show", "e2e", "--limit", "1000", "--json").stdout)
    texts = [turn["text"] for turn in shown["data"]]
    assert [turn["turn"] for turn in shown["data"]] == list(range(1, len(texts) + 1))
    assert texts.count(FACT) == 1
    assert texts[-2:] == [question["content"], answer.choices[0].message.content]


def test_a_chat_in_the_terminal_goes_on_in_another_process(server: Server, tmp_path: Path) -> None:
    talk = ("chat", "--session", "terminal", "--max-tokens", "4")
    assert server.cli(*talk, stdin=f"{FACT}\n").returncode == 0
    first = json.loads(server.cli("sessions", "show", "terminal", "--json").stdout)
    assert first["data"][0]["text"] == FACT
    again = server.cli(*talk, stdin="Where is it?\n/new\nThis isn't kept.\n")
    assert again.returncode == 0, again.stderr
    assert "terminal goes on" in again.stderr
    assert FACT[:40] in again.stderr
    saved = tmp_path / "terminal.json"
    assert server.cli("sessions", "export", "terminal", "--format", "json", "-o", str(saved)).returncode == 0
    kept = json.loads(saved.read_text())["data"]
    assert [turn["text"] for turn in kept if turn["speaker"] == "user"] == [FACT, "Where is it?"]
    alone, whole = (turn["answer"]["usage"]["prompt_tokens"] for turn in kept if turn["answer"])
    assert whole > alone, "what was said before is in the prompt"
    assert FACT in server.cli("sessions", "export", "terminal").stdout
    assert server.cli("sessions", "export", "nobody").returncode == 1
    assert server.cli("sessions", "export", "terminal", "--format", "pdf").returncode == 2
    assert server.cli("chat", "--session", "file-1").returncode == 2


def test_the_command_line_lists_searches_and_forgets(server: Server) -> None:
    ask(server, [{"role": "user", "content": "The Moor bridge opens on 12 May."}], session="cli")
    assert "cli" in server.cli("sessions", "ls").stdout
    listed = json.loads(server.cli("sessions", "ls", "--json").stdout)["sessions"]
    assert {"cli": 2}.items() <= {each["id"]: each["turns"] for each in listed}.items()
    found = json.loads(
        server.cli("memory", "search", "When does the Moor bridge open?", "--session", "cli", "--json").stdout
    )
    assert (found["hits"][0]["session"], found["hits"][0]["turn"]) == ("cli", 1)
    assert "12 May" in server.cli("memory", "search", "Moor bridge").stdout
    assert server.cli("memory", "forget", "--session", "cli").returncode == 0
    for words in (("sessions", "show", "cli"), ("memory", "forget", "--session", "cli")):
        gone = server.cli(*words)
        assert gone.returncode == 1
        assert "no such session" in gone.stderr
    assert "12 May" not in server.cli("memory", "search", "Moor bridge").stdout
    with pytest.raises(openai.NotFoundError):
        ask(server, [{"role": "user", "content": "When?"}], session_scope=["cli"])


def test_what_the_user_tells_is_known_shown_exported_and_forgotten(server: Server) -> None:
    ask(server, [{"role": "user", "content": "My name is Anna Keller. 我住在波恩。"}], session="who")
    answer = ask(server, [{"role": "user", "content": "Where do I live?"}], session="elsewhere")
    report = answer.model_extra["perilune"]
    jsonschema.validate(report, SCHEMA)
    told = [("name", "Anna Keller", "who", 1), ("residence", "波恩", "who", 1)]
    assert [tuple(fact.values()) for fact in report["memory"]["profile"]] == told
    shown = json.loads(server.cli("memory", "show", "--json").stdout)["facts"]
    assert [(each["key"], each["value"], each["session"], each["turn"]) for each in shown] == told
    assert server.cli("memory", "edit", "residence", "Oslo").returncode == 0
    assert "Oslo" in server.cli("memory", "show").stdout
    corrected = server.cli("memory", "edit", "1:0", "My name is Anne.", "--session", "who")
    assert "My name is Anne. (corrected)" in corrected.stdout
    records = [json.loads(line) for line in server.cli("memory", "export").stdout.splitlines()]
    assert {"profile.fact", "summary.correction", "turn"} <= {each["type"] for each in records}
    for words in (("--key", "residence"), ("--session", "who"), ("--session", "elsewhere")):
        assert server.cli("memory", "forget", *words).returncode == 0
    assert json.loads(server.cli("memory", "show", "--history", "--json").stdout) == {"facts": []}
    assert server.cli("memory", "forget", "--key", "residence").returncode == 1
    ask(server, [{"role": "user", "content": "My name is Anna Keller."}], session="again")
    assert server.cli("memory", "forget").returncode == 2
    assert server.cli("memory", "forget", "--everything").returncode == 0
    assert json.loads(server.cli("memory", "show", "--json").stdout) == {"facts": []}
    assert json.loads(server.cli("sessions", "ls", "--json").stdout)["sessions"] == []
