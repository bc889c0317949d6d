"""Limits of keys on the wire: headers of answers, streams and refusals; what a client may rely on."""

from __future__ import annotations

import openai
import pytest

from perilune.core import Admitted, RateState, Request
from perilune.errors import QuotaExceeded, RateLimited

from .conftest import Serve
from .fakes import MODEL, Fail, FakeService, Step, answer

RATES = RateState(60, 59, 1.0, 1000, 900, 6.0)
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


def admitted(request: Request) -> list[Step]:
    return [Admitted(RATES), *answer(request)]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_tells_what_is_left(serve: Serve, stream: bool) -> None:
    service = FakeService()
    async with serve(service) as server:
        async with server.http.post("/v1/chat/completions", json=ASK) as reply:
            assert "x-ratelimit-limit-requests" not in reply.headers  # a key without limits
        service.script = admitted(service.requests[0])
        async with server.http.post("/v1/chat/completions", json={**ASK, "stream": stream}) as reply:
            assert reply.status == 200
            assert reply.headers["x-ratelimit-remaining-requests"] == "59"
            assert reply.headers["x-ratelimit-reset-tokens"] == "6s"
            assert b"42" in await reply.read()


async def test_a_refusal_says_when_and_a_quota_that_it_is_in_vain(serve: Serve) -> None:
    for error, again in (
        (RateLimited("Slow.", kind="tokens", retry_after_s=3.0, rates=RATES), None),
        (QuotaExceeded("Used up."), "false"),
    ):
        async with serve(FakeService([Fail(error)])) as server:
            with pytest.raises(openai.RateLimitError) as caught:
                await server.client.chat.completions.create(**ASK)  # type: ignore[call-overload]
        headers = caught.value.response.headers
        assert headers.get("x-should-retry") == again
        assert caught.value.code == error.code
        assert headers["retry-after"] == ("3" if again is None else "2")
