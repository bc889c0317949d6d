"""The same prompt counted in each dialect."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Serve
from .fakes import MODEL

MESSAGES = [{"role": "user", "content": "What is it?"}]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/messages/count_tokens", {"messages": MESSAGES}, {"input_tokens": 3}),
        ("/anthropic/v1/messages/count_tokens", {"messages": MESSAGES}, {"input_tokens": 3}),
        (
            "/v1/responses/input_tokens",
            {"input": "What is it?"},
            {"object": "response.input_tokens", "input_tokens": 3},
        ),
        ("/v1/tokenizers/estimate-token-count", {"messages": MESSAGES}, {"data": {"total_tokens": 3}}),
    ],
)
async def test_tokens_are_counted(serve: Serve, path: str, body: dict[str, Any], said: dict[str, Any]) -> None:
    async with serve() as server:
        async with server.http.post(path, json={"model": MODEL, **body}) as reply:
            assert (reply.status, await reply.json()) == (200, said)
        async with server.http.post(path, json={"model": MODEL}) as reply:
            assert reply.status == 400
        assert server.service.requests == []
