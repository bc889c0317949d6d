"""Unmodified clients, each in its own environment, against the real server and model.

A client's driver runs once; every test reads one proof of it. The model is small, so calls are forced by
`tool_choice`, and parallel ones shown by a conversation that holds two.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.clients.conftest import DRIVERS, PAGE, PROGRAMS, Prove, shown
from tests.docs.pages import run_blocks

pytestmark = pytest.mark.timeout(900)  # the first test of a client makes its environment

ALL = tuple(PROGRAMS)
OPENAI = ("openai-python", "openai-node")
ANTHROPIC = ("anthropic-python", "anthropic-node")
QUESTIONS = json.loads((DRIVERS / "questions.json").read_text())


@pytest.mark.parametrize("client", ALL)
def test_programs_of_the_page(prove: Prove, client: str) -> None:
    said = prove(client)["page"]["said"]
    assert len(said) == len(shown(client)) > 0
    assert all(len(each.strip()) > 10 for each in said)


def test_no_program_of_the_page_is_left_out() -> None:
    told = [block for client in ALL for block in shown(client)]
    assert sorted(told, key=lambda block: block.line) == [
        each for each in run_blocks(PAGE) if each.language != "sh"
    ]


@pytest.mark.parametrize("client", ALL)
def test_plain(prove: Prove, client: str) -> None:
    facts = prove(client)["plain"]
    assert len(facts["text"]) > 20
    assert facts["usage"]["prompt_tokens"] > 10
    assert 0 < facts["usage"]["completion_tokens"] <= 16


@pytest.mark.parametrize("client", ALL)
def test_stream_with_usage(prove: Prove, client: str) -> None:
    plain, facts = prove(client)["plain"], prove(client)["stream"]
    assert facts["text"] == plain["text"]
    assert facts["pieces"] > 2
    for name in ("prompt_tokens", "completion_tokens"):
        assert facts["usage"][name] == plain["usage"][name]


@pytest.mark.parametrize("client", ALL)
def test_tools(prove: Prove, client: str) -> None:
    facts = prove(client)["tools"]
    check_calls(facts["calls"], 1)
    assert facts["reason"] in ("tool_calls", "tool_use")
    assert facts["text"]


@pytest.mark.parametrize("client", ALL)
def test_parallel_tools(prove: Prove, client: str) -> None:
    facts = prove(client)["parallel"]
    check_calls(facts["calls"], 2)
    assert facts["streamed"] == facts["calls"]
    assert facts["one"] == 1


def check_calls(calls: list[dict[str, Any]], least: int) -> None:
    assert len(calls) >= least
    for arguments in calls:
        jsonschema.validate(arguments, QUESTIONS["weather"])


@pytest.mark.parametrize("client", ALL)
def test_json_schema(prove: Prove, client: str) -> None:
    jsonschema.validate(prove(client)["json_schema"]["value"], QUESTIONS["city"])


@pytest.mark.parametrize("client", ALL)
def test_a_429_is_waited_out(prove: Prove, client: str) -> None:
    """The key may run one request; the client's second comes while its first is being answered."""
    proofs = prove(client)
    assert proofs["retry"]["text"]
    assert proofs.refusals > 0


@pytest.mark.parametrize("client", ALL)
def test_leaving_a_stream_stops_the_answer(prove: Prove, client: str) -> None:
    """The driver's process waited while the server became idle, long before the answer's own end."""
    proofs = prove(client)
    assert proofs["cancel"]["spent_s"] > 0
    assert proofs.stopped


@pytest.mark.parametrize("client", OPENAI)
def test_openai_errors_have_their_classes(prove: Prove, client: str) -> None:
    found = prove(client)["errors"]["found"]
    assert found["model"] == ["NotFoundError", "model_not_found", "model"]
    assert found["value"] == ["BadRequestError", "invalid_request", "temperature"]


@pytest.mark.parametrize("client", ANTHROPIC)
def test_anthropic_errors_have_their_classes(prove: Prove, client: str) -> None:
    found = prove(client)["errors"]["found"]
    assert found["model"] == ["NotFoundError", "not_found_error", True]
    assert found["value"] == ["BadRequestError", "invalid_request_error", True]


@pytest.mark.parametrize("client", [*OPENAI, *ANTHROPIC])
def test_request_ids_reach_the_client(prove: Prove, client: str) -> None:
    assert prove(client)["plain"]["id"].startswith("req_")


@pytest.mark.parametrize("client", ANTHROPIC)
def test_tokens_are_counted_beforehand(prove: Prove, client: str) -> None:
    proofs = prove(client)
    assert proofs["count"]["tokens"] == proofs["plain"]["usage"]["prompt_tokens"]


@pytest.mark.parametrize("client", [*OPENAI, "langchain-openai", "pydantic-ai", "llm"])
def test_responses(prove: Prove, client: str) -> None:
    proofs = prove(client)
    facts = proofs["responses"]
    assert facts["text"].startswith(proofs["plain"]["text"][:20])
    assert facts.get("same", True)
    if "value" in facts:
        jsonschema.validate(facts["value"], QUESTIONS["city"])


def test_events_of_a_streamed_response(prove: Prove) -> None:
    kinds = set(prove("openai-python")["responses"]["kinds"])
    assert {"response.created", "response.output_text.delta", "response.output_item.done"} <= kinds


@pytest.mark.parametrize("client", [*OPENAI, "litellm"])
def test_files(prove: Prove, client: str) -> None:
    facts = prove(client)["files"]
    assert facts["content"] == "The rent is 940 crowns a month."
    assert facts["listed"]
    assert facts["gone"]
    assert facts.get("status", "processed") == "processed"


@pytest.mark.parametrize("client", [*OPENAI, "litellm"])
def test_batches(prove: Prove, client: str) -> None:
    """One line that is answered, and one that its endpoint refuses."""
    facts = prove(client)["batches"]
    assert facts["text"]
    assert {name: facts[name] for name in ("status", "counts", "ids", "refused", "listed", "late")} == {
        "status": "completed",
        "counts": {"total": 2, "completed": 1, "failed": 1},
        "ids": ["l0", "l1"],
        "refused": 400,
        "listed": True,
        "late": True,
    }


@pytest.mark.parametrize("client", ["litellm", "pydantic-ai"])
def test_frameworks_speak_anthropics_dialect_too(prove: Prove, client: str) -> None:
    proofs = prove(client)
    facts = proofs["anthropic"]
    assert facts["text"] == proofs["plain"]["text"]
    assert facts.get("streamed", facts["text"]) == facts["text"]
