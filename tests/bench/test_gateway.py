"""The gateway bench's own parts: the engine that computes nothing, the open-loop client, what counts as added."""

from __future__ import annotations

import asyncio
import json

from bench.gateway import LOADS, _added, mock_engine
from bench.open_loop import OpenLoop, Timing


def test_the_client_times_what_the_mock_engine_does() -> None:
    with mock_engine() as port:
        for load in LOADS:
            loop = OpenLoop(port, load.bodies(), {}, load.mark)
            timings = asyncio.run(loop.run(20, 0.5))
            assert [timing.status for timing in timings] == [200] * 10
            assert all(0.019 <= timing.first_s <= timing.total_s < 5 for timing in timings)


def test_a_server_that_falls_behind_shows_it() -> None:
    """Open loop: requests are due at their times, whatever the server does."""

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            async with one_at_a_time:
                await asyncio.sleep(0.05)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    one_at_a_time = asyncio.Lock()

    async def run() -> list[Timing]:
        server = await asyncio.start_server(slow, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        timings = await OpenLoop(port, lambda _: b"{}", {}, b"{}").run(100, 0.2)
        server.close()
        return timings

    timings = asyncio.run(run())
    assert timings[-1].total_s > 0.6  # 20 answers of 50 ms, asked for within 0.2 s


def test_added_is_the_difference_of_percentiles() -> None:
    def turn(seconds: float) -> list[Timing]:
        return [Timing(200, seconds, seconds + 1)] * 10

    found = _added(LOADS[1], turn(0.020), turn(0.023))
    assert found == {"ttft_added_p50_ms_50sps": 3.0, "ttft_added_p99_ms_50sps": 3.0}


def test_a_server_that_refuses_is_no_measurement() -> None:
    async def run() -> list[Timing]:
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        timings = await OpenLoop(server.sockets[0].getsockname()[1], lambda _: b"{}", {}, b"{}").run(10, 0.3)
        server.close()
        return timings

    assert {timing.status for timing in asyncio.run(run())} == {0}


def test_a_conversation_comes_again_with_a_new_question() -> None:
    """And a new text is new in every block of it."""
    same, new = LOADS[2].bodies(), LOADS[3].bodies()
    one, other = (json.loads(same(number))["messages"] for number in (1, 2))
    assert one[:-1] == other[:-1]
    assert one[-1] != other[-1]
    assert sum(len(message["content"]) for message in one) > 480_000
    one, other = (json.loads(new(number))["messages"] for number in (1, 2))
    assert not [message for message in one if message in other]
