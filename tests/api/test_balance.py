"""Moonshot's balance, and each dialect's headers of rates and errors."""

from __future__ import annotations

import pytest

from perilune.core import Admitted, RateState
from perilune.errors import QuotaExceeded, RateLimited
from perilune.service.ports import Caller

from .conftest import Serve
from .fakes import MODEL, Fail, FakeService, answer, opening

MESSAGES = [{"role": "user", "content": "Hello."}]
CHAT = ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES})
ANTHROPIC = ("/v1/messages", {"model": MODEL, "messages": MESSAGES, "max_tokens": 5})
RATES = RateState(10, 9, 6.0, 1000, 900, 1.5)


async def test_balance(serve: Serve) -> None:
    keys = {"any": Caller("local", "user", key_id="k"), "free": Caller("local", "user")}
    async with serve(FakeService(keys=keys)) as server:
        for key, left, budget in (("any", 18.5, 20.0), ("free", 1e9, None)):
            headers = {"authorization": f"Bearer {key}"}
            async with server.http.get("/v1/users/me/balance", headers=headers) as reply:
                found = await reply.json()
            assert found["data"] == {"available_balance": left, "voucher_balance": 0.0, "cash_balance": left}
            assert (found["code"], found["status"], found["perilune"]["budget"]) == (0, True, budget)


@pytest.mark.parametrize("stream", [False, True])
async def test_rates_of_answers(serve: Serve, stream: bool) -> None:
    service = FakeService()
    async with serve(service) as server:
        for (path, body), prefix in ((CHAT, "x-ratelimit-"), (ANTHROPIC, "anthropic-ratelimit-")):
            service.script = None
            async with server.http.post(path, json=body) as reply:
                assert not [name for name in reply.headers if "ratelimit" in name.lower()]
                assert reply.headers["x-request-id"] == reply.headers["request-id"]
                assert int(reply.headers["openai-processing-ms"]) >= 0
            service.script = [Admitted(RATES), *answer(service.requests[-1])]
            async with server.http.post(path, json={**body, "stream": stream}) as reply:
                found = {name.lower() for name in reply.headers if "ratelimit" in name.lower()}
                assert len(found) == 6
                assert all(name.startswith(prefix) for name in found)


async def test_refusals(serve: Serve) -> None:
    limited = RateLimited("Slow.", hint="Wait.", kind="requests", retry_after_s=2.5, rates=RATES)
    service = FakeService()
    async with serve(service) as server:
        for (path, body), name in (
            (CHAT, "x-ratelimit-remaining-requests"),
            (ANTHROPIC, "anthropic-ratelimit-requests-remaining"),
        ):
            service.script = [Fail(limited)]
            async with server.http.post(path, json=body) as reply:
                assert (reply.status, reply.headers[name]) == (429, "9")
                assert (reply.headers["retry-after"], reply.headers["retry-after-ms"]) == ("3", "3000")
                assert "x-should-retry" not in reply.headers
            service.script = [*opening()[:1], Fail(QuotaExceeded("Spent.", hint="Wait."))]
            async with server.http.post(path, json={**body, "stream": True}) as reply:
                assert (reply.status, reply.headers["x-should-retry"]) == (429, "false")
