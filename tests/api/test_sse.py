"""A stream of events leaves nothing running behind it, whenever its owner is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from perilune.api.sse import EventStream


async def _send(message: MutableMapping[str, Any]) -> None:
    """A client that takes everything at once: no send lets the loop turn."""


async def _left_over(turns: int) -> int:
    """How many tasks outlive a stream whose owner is cancelled after so many turns of the loop."""

    async def owner() -> None:
        async with EventStream(_send, heartbeat_s=0.01) as out:
            await out.write(b"first")
            await out.write_soon(b"second")
            await out.end()

    before = asyncio.all_tasks()
    task = asyncio.create_task(owner())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    await asyncio.sleep(0)
    return len(asyncio.all_tasks() - before)


@pytest.mark.parametrize("turns", range(6))
def test_an_owner_cancelled_at_its_end_leaves_no_heartbeat(turns: int) -> None:
    assert asyncio.run(_left_over(turns)) == 0


def test_a_heartbeat_of_an_ended_stream_lets_the_loop_turn() -> None:
    async def waits_longer_than_a_heartbeat() -> None:
        async with EventStream(_send, commit_after_s=0.001, heartbeat_s=0.001) as out:
            await out.end()
            await asyncio.sleep(0.02)

    asyncio.run(waits_longer_than_a_heartbeat())
