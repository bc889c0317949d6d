"""OpenAI's Completions by the unmodified client, over a scripted service."""

from __future__ import annotations

from typing import Any

import pytest

from perilune.core import RawPrompt

from .conftest import Serve
from .fakes import MODEL, WORDS

SAID = "".join(WORDS)


async def test_several_prompts_and_choices(serve: Serve) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": ["Once", "Twice"], "n": 2, "logprobs": 1}
    async with serve() as server:
        whole = await server.client.completions.create(**asked)
        parts = ["", "", "", ""]
        usage = []
        options = {"include_usage": True}
        async for chunk in await server.client.completions.create(**asked, stream=True, stream_options=options):
            usage += [chunk.usage] if chunk.usage else []
            for choice in chunk.choices:
                parts[choice.index] += choice.text
        requests = server.service.requests
    assert [choice.text for choice in whole.choices] == parts == [SAID] * 4
    assert [choice.finish_reason for choice in whole.choices] == ["stop"] * 4
    logprobs = whole.choices[3].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list(WORDS)
    assert logprobs.text_offset == [0, 4, 11, 14, 16]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5, -0.5, -9999.0]
    assert whole.usage is not None
    assert usage == [whole.usage]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (192, 20)
    assert [request.raw.text for request in requests if request.raw] == ["Once", "Twice"] * 2
    assert len({request.request_id for request in requests}) == 4


async def test_token_ids(serve: Serve) -> None:
    async with serve() as server:
        for prompt, wanted in (([1, 2], [(1, 2)]), ([[1], [2, 3]], [(1,), (2, 3)])):
            server.service.requests.clear()
            await server.client.completions.create(model=MODEL, prompt=prompt, echo=True, best_of=2)  # type: ignore[arg-type]
            raw = [request.raw for request in server.service.requests]
            assert raw == [RawPrompt(None, ids, echo=True, best_of=2) for ids in wanted]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"prompt": ["a"] * 30, "n": 3}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
async def test_mistakes_are_told(serve: Serve, body: dict[str, Any], param: str) -> None:
    async with serve() as server:
        async with server.http.post("/v1/completions", json={"model": MODEL, "prompt": "a", **body}) as reply:
            assert reply.status == 400
            assert (await reply.json())["error"]["param"].startswith(param)
        assert server.service.requests == []
