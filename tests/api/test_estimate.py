"""POST /v1/estimate: the plan of a chat request, nothing run."""

from __future__ import annotations

from .conftest import Serve
from .fakes import MODEL, FakeService

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "How far is the moon?"}]}


async def test_the_plan_is_told_and_nothing_runs(serve: Serve) -> None:
    service = FakeService()
    async with serve(service) as server, server.http.post("/v1/estimate", json=BODY) as reply:
        assert reply.status == 200
        assert await reply.json() == {
            "object": "estimate",
            "model": MODEL,
            "plan": "full",
            "deadline_s": 5.0,
            "predicted_ttft_s": 0.25,
            "bound_ttft_s": 0.31,
            "in_time": True,
            "fidelity": 1.0,
            "prompt_tokens": 96,
            "cached_tokens": 32,
            "degradations": [],
        }
    assert not service.requests


async def test_errors_are_those_of_the_chat(serve: Serve) -> None:
    async with serve() as server:
        async with server.http.post("/v1/estimate", json={"model": MODEL, "messages": []}) as reply:
            assert reply.status == 400
        async with server.http.post("/v1/estimate", json={**BODY, "model": "other"}) as reply:
            assert reply.status == 404
