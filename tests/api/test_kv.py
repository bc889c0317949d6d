"""/v1/kv: who sees the health view, and what may be asked."""

from __future__ import annotations

import json

from perilune.service.ports import Caller

from .conftest import Serve
from .fakes import FakeService


async def test_only_an_admin_sees_the_health_view(serve: Serve) -> None:
    keys = {"boss": Caller("acme", "admin"), "worker": Caller("acme", "user")}
    async with serve(FakeService(keys=keys)) as server:
        for key, status in (("boss", 200), ("worker", 403)):
            headers = {"authorization": f"Bearer {key}"}
            async with server.http.get("/v1/kv/health", headers=headers) as reply:
                assert reply.status == status
            async with server.http.put("/v1/kv/attention_debug", json={"on": True}, headers=headers) as reply:
                assert reply.status == status
        async with server.http.get("/v1/kv/health") as reply:
            assert reply.status == 401


async def test_steps_come_when_asked_for_and_debug_is_switched(serve: Serve) -> None:
    async with serve() as server:
        async with server.http.get("/v1/kv/health") as reply:
            told = await reply.json()
        assert told["attention_debug"]["steps"] == []
        assert not told["attention_debug"]["on"]
        assert [finding["setting"] for finding in told["findings"]] == ["attention.window_size"]
        async with server.http.put("/v1/kv/attention_debug", json={"on": True}) as reply:
            assert await reply.json() == {"on": True}
        async with server.http.get("/v1/kv/health?steps=3") as reply:
            told = await reply.json()
        assert told["attention_debug"]["on"]
        assert [step["number"] for step in told["attention_debug"]["steps"]] == [8, 9, 10]
        assert set(told["attention_debug"]["steps"][0]["layers"][0]) == {
            *("local_attn_ms", "sparse_attn_ms", "summary_attn_ms", "kv_cache_ms", "other_ms"),
            *("sparse_attn_hit_rate", "topk_dynamics"),
        }


async def test_wrong_questions_are_refused(serve: Serve) -> None:
    async with serve() as server:
        for asked in ("-1", "257", "x", "1e9", "٣", "9" * 5000):
            async with server.http.get("/v1/kv/health", params={"steps": asked}) as reply:
                assert reply.status == 400, asked
        for body in (b"", b"{}", b'{"on":1}', b'{"on":true,"more":1}', b"[]", b'{"on":"true"}'):
            async with server.http.put("/v1/kv/attention_debug", data=body) as reply:
                assert reply.status == 400, body
        async with server.http.put("/v1/kv/attention_debug", data=json.dumps({"on": "x" * 5000})) as reply:
            assert reply.status == 413
        assert not server.service.kv.on
