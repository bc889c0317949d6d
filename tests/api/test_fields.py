"""The written rule for fields that aren't honoured: refused, ignored, or ignored and told; and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from perilune.api.completions import WireCompletion
from perilune.api.embeddings import WireEmbedding
from perilune.api.fields import IGNORED, IGNORED_HEADER, REFUSED
from perilune.api.messages_request import WireMessages
from perilune.api.responses_request import WireResponse
from perilune.api.schema import WireChat
from perilune.api.wire import Wire

from .conftest import Serve
from .fakes import MODEL

MESSAGES = [{"role": "user", "content": "Hello."}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES}),
    "responses": ("/v1/responses", {"model": MODEL, "input": "Hello."}),
    "messages": ("/v1/messages", {"model": MODEL, "messages": MESSAGES, "max_tokens": 5}),
}
TITLES = {
    "chat": "Chat Completions",
    "responses": "Responses",
    "messages": "Messages",
    "completions": "Completions",
    "embeddings": "Embeddings",
}


def test_the_docs_show_the_rule() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    for dialect, title in TITLES.items():
        cells = (
            ", ".join(f"`{name}`" for name in names) or "none" for names in (REFUSED[dialect], IGNORED[dialect])
        )
        assert f"| {title} | {' | '.join(cells)} |" in text, dialect
    assert REFUSED.keys() == IGNORED.keys() == TITLES.keys()


CLIENTS: list[tuple[str, type[Wire], Any]] = [
    ("chat", WireChat, chat_create_params.CompletionCreateParamsStreaming),
    ("completions", WireCompletion, completion_create_params.CompletionCreateParamsStreaming),
    ("embeddings", WireEmbedding, embedding_create_params.EmbeddingCreateParams),
    ("responses", WireResponse, response_create_params.ResponseCreateParamsStreaming),
    ("messages", WireMessages, message_create_params.MessageCreateParamsStreaming),
    ("messages", WireMessages, beta_message_create_params.MessageCreateParamsStreaming),
    ("messages", WireMessages, message_count_tokens_params.MessageCountTokensParams),
]


@pytest.mark.parametrize(("dialect", "read", "sent"), CLIENTS)
def test_every_parameter_of_the_official_clients_has_its_rule(dialect: str, read: type[Wire], sent: Any) -> None:
    """Honoured, refused or ignored: none is left to chance."""
    ruled = {*read.model_fields, *REFUSED[dialect], *IGNORED[dialect]}
    assert len(get_type_hints(sent)) > 4
    assert get_type_hints(sent).keys() <= ruled
    assert not set(REFUSED[dialect]) & set(IGNORED[dialect])
    assert not set(read.model_fields) & {*REFUSED[dialect], *IGNORED[dialect]}


@pytest.mark.parametrize("dialect", BODIES)
async def test_the_rule_holds_on_the_wire(serve: Serve, dialect: str) -> None:
    path, body = BODIES[dialect]
    async with serve() as server:
        for field, neutral in REFUSED[dialect].items():
            async with server.http.post(path, json={**body, field: {"x": 1}}) as reply:
                found = await reply.json()
                assert reply.status == 400, (field, found)
                assert field in found["error"]["message"]
            for value in neutral:
                async with server.http.post(path, json={**body, field: value}) as reply:
                    assert reply.status == 200, (field, value, await reply.text())
        known = dict.fromkeys(IGNORED[dialect], "x")
        async with server.http.post(path, json={**body, **known, "shoe_size": 43, "nothing": None}) as reply:
            assert reply.status == 200, await reply.text()
            assert reply.headers[IGNORED_HEADER.decode()] == "shoe_size"
        async with server.http.post(path, json={**body, "stream": True, "shoe_size": 43}) as reply:
            assert reply.headers[IGNORED_HEADER.decode()] == "shoe_size"
        async with server.http.post(path, json=body) as reply:
            assert IGNORED_HEADER.decode() not in reply.headers
