"""The replayer: requests go out at their times whatever the server does, and what came back is told by class."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from perilune.cli.replay import Replayed, Target, excerpted, prompt_of, replay, scaled, server, summary
from perilune.core import ServiceClass
from perilune.engine.traces import TraceRequest
from perilune.errors import Unreachable

P0, P1 = ServiceClass.P0_INTERACTIVE, ServiceClass.P1_DOCUMENT


def played(
    requests: list[TraceRequest], first_s: float, refused: int = 0
) -> tuple[list[Replayed], list[dict[str, Any]]]:
    """Replay against a server that answers one request at a time, each after `first_s`."""
    seen: list[dict[str, Any]] = []
    one_at_a_time = asyncio.Lock()

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append(body)
        if len(seen) <= refused:
            return web.json_response({"error": {}}, status=503)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n')
        async with one_at_a_time:
            await asyncio.sleep(first_s)
        await answer.write(b'data: {"choices": [{"delta": {"content": "moon"}}]}\n\ndata: [DONE]\n\n')
        return answer

    async def run() -> list[Replayed]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            return await replay(Target(f"http://127.0.0.1:{port}/v1", "m", drain_s=5.0), requests, 8)
        finally:
            await runner.cleanup()

    return asyncio.run(run()), seen


def test_requests_go_out_at_their_times() -> None:
    requests = [TraceRequest(0.05 * number, 20, 3, P0, deadline_s=0.3) for number in range(8)]
    found, seen = played(requests, 0.15)
    assert [one.status for one in found] == [200] * 8
    assert found[-1].ttft_s is not None
    assert found[-1].ttft_s > 0.7
    assert found[0].in_time
    assert not found[-1].in_time
    assert {body["service_tier"] for body in seen} == {"default"}
    assert all(body["ignore_eos"] and body["deadline_s"] == 0.3 and body["max_tokens"] == 3 for body in seen)


def test_what_came_is_told_by_class() -> None:
    requests = [TraceRequest(0.0, 20, 3, P0, deadline_s=5.0), TraceRequest(0.1, 20, 3, P1, deadline_s=0.01)]
    requests += [TraceRequest(0.2, 20, 3, P0, deadline_s=5.0)]
    rows = summary(played(requests, 0.05, refused=1)[0])
    assert rows["P0"]["requests"] == 2
    assert rows["P0"]["refused"] == rows["P0"]["in_time"] == rows["P0"]["done"] == 0.5
    assert rows["P1"]["in_time"] == 0.0
    assert rows["P1"]["done"] == 1.0
    assert "P2" not in rows


def test_a_server_that_is_not_there_is_a_status_of_0() -> None:
    target = Target("http://127.0.0.1:9/v1", "m")
    (one,) = asyncio.run(replay(target, [TraceRequest(0.0, 20, 3)], 8))
    assert (one.status, one.ttft_s, one.total_s) == (0, None, None)


def test_equal_blocks_make_equal_beginnings() -> None:
    one, other = (TraceRequest(0.0, 100, 1, hash_ids=ids) for ids in ((1, 2, 3), (1, 2, 9)))
    first, second = prompt_of(one, 0, 30).split(), prompt_of(other, 1, 30).split()
    assert len(first) == len(second) == 100
    assert first[:60] == second[:60]
    assert first[60:] != second[60:]


def test_a_trace_is_scaled(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 500 * n, "input_length": 9000, "output_length": 100, "hash_ids": [0, n]} for n in range(40)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    requests = excerpted(trace, 1, 0.1, 2.0, 0.1, (5.0, 30.0), 0.0)
    assert {request.prompt_tokens for request in requests} == {900}
    assert {request.service_class for request in requests} == {P1}  # by the trace's own lengths
    assert requests == excerpted(trace, 1, 0.1, 2.0, 0.1, (5.0, 30.0), 0.0)
    assert requests != excerpted(trace, 2, 0.1, 2.0, 0.1, (5.0, 30.0), 0.0)
    assert max(request.arrival_s for request in requests) <= 6.0
    assert scaled([TraceRequest(4.0, 1, 1)], 2.0, 0.01)[0].arrival_s == 2.0


def test_no_server_is_said(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="No server runs here"):
        server(tmp_path, None, None)
    assert server(tmp_path, "http://x/v1", "m") == ("http://x/v1", "m")
