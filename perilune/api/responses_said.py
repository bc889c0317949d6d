"""What is kept of an answer of OpenAI's Responses, and what it adds to its conversation."""

from __future__ import annotations

from typing import Any

from perilune.api.responses_answer import StreamedResponse, WholeResponse
from perilune.api.responses_items import named
from perilune.api.responses_request import ResponseCall
from perilune.memory.responses import FINISHED, Made


def made_of(answer: WholeResponse | StreamedResponse, body: dict[str, Any], events: bytes | None = None) -> Made:
    """What `ports.Responses.finish` takes. An answer that has come to no end adds nothing to a conversation."""
    items = said_in(answer.call, body) if body["status"] in FINISHED else []
    return Made(body, events, answer.quoted, items)


def said_in(call: ResponseCall, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What an answer adds to its conversation."""
    known = {item["id"] for item in call.compacted}
    own = [item if item.get("id") in known else named(item) for item in call.items]
    return [*own, *(item for item in body["output"] if item["id"] not in known)]
