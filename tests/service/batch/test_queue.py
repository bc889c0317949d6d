"""The durable queue on SQLite and PostgreSQL: the next life skips what was done, not what was under way."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from perilune.errors import NotFound
from perilune.service.batch import queue as module
from perilune.service.batch.queue import BatchQueue
from perilune.service.batch.runner import SHARD_LINES

WITHIN_S = 30.0


class Steps:
    """Three shards. `holds` is the one that isn't done before `go`; `breaks` how often a step fails first."""

    def __init__(self, holds: int | None = None, breaks: int = 0) -> None:
        self.holds = holds
        self.breaks = breaks
        self.go = asyncio.Event()
        self.seen: list[str] = []
        self.finished = asyncio.Event()

    async def prepare(self, batch_id: str) -> int:
        self.seen.append("prepare")
        if batch_id.endswith("gone"):
            raise NotFound("It is gone.")
        return 3 * SHARD_LINES

    async def work(self, batch_id: str, first: int) -> bool:
        self.seen.append(str(first // SHARD_LINES))
        if self.breaks:
            self.breaks -= 1
            raise OSError("the disk is full")
        if first // SHARD_LINES == self.holds:
            await self.go.wait()
        return True

    async def finish(self, batch_id: str) -> None:
        self.seen.append("finish")
        self.finished.set()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue("postgres") if request.param == "postgresql" else ""
    return found


@pytest.fixture
def batch_id() -> str:
    return f"batch_{secrets.token_hex(8)}"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_the_next_life_goes_on_with_the_step_that_was_under_way(
    tmp_path: Path, url: str, batch_id: str
) -> None:
    first = Steps(holds=1)
    queue = BatchQueue(first, tmp_path, url, poll_s=0.02)
    await queue.put("local", batch_id)
    await until(lambda: first.seen == ["prepare", "0", "1"])
    await queue.close()
    await queue.close()
    second = Steps()
    queue = BatchQueue(second, tmp_path, url, poll_s=0.02)
    await queue.put("local", batch_id)  # as a start does for what hasn't ended: it runs once all the same
    await asyncio.wait_for(second.finished.wait(), WITHIN_S)
    assert second.seen == ["1", "2", "finish"]
    await queue.put("local", batch_id)
    await queue.forget(batch_id)
    await asyncio.sleep(0.1)
    await queue.close()
    assert second.seen == ["1", "2", "finish"]


@pytest.mark.parametrize("pause_s", [(0.3, 0.0), (0.0, 0.3)], ids=["before", "behind"])
async def test_it_closes_although_a_step_is_just_being_handed_over(
    tmp_path: Path, batch_id: str, monkeypatch: pytest.MonkeyPatch, pause_s: tuple[float, float]
) -> None:
    """A busy machine stops DBOS's thread anywhere: also between the step's begin and the next line."""
    hand_over, reached = asyncio.run_coroutine_threadsafe, threading.Event()

    def slowly(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Any:
        before_s, behind_s = pause_s if len(steps.seen) == 1 else (0.0, 0.0)
        handed = None
        if behind_s:
            handed = hand_over(work, loop)
        if before_s or behind_s:
            reached.set()
        time.sleep(before_s + behind_s)
        return handed or hand_over(work, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", slowly)
    steps = Steps(holds=0)
    queue = BatchQueue(steps, tmp_path, poll_s=0.02)
    await queue.put("local", batch_id)
    await until(reached.is_set)
    await asyncio.wait_for(queue.close(), WITHIN_S)
    assert set(steps.seen) <= {"prepare", "0"}


async def test_a_step_that_fails_is_tried_again_and_one_without_a_batch_ends(
    tmp_path: Path, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", (0.01, 0.02))
    steps = Steps(breaks=3)
    queue = BatchQueue(steps, tmp_path, poll_s=0.02)
    await queue.put("local", batch_id)
    await asyncio.wait_for(steps.finished.wait(), WITHIN_S)
    assert steps.seen == ["prepare", "0", "0", "0", "0", "1", "2", "finish"]
    steps.finished.clear()
    await queue.put("local", f"{batch_id}-gone")
    await asyncio.wait_for(steps.finished.wait(), WITHIN_S)
    assert steps.seen[-2:] == ["prepare", "finish"]
    await queue.close()


async def test_tenants_do_not_wait_for_each_others_batches(tmp_path: Path, batch_id: str) -> None:
    running: list[str] = []

    class Slow(Steps):
        async def prepare(self, batch_id: str) -> int:
            running.append(batch_id)
            await self.go.wait()
            return 0

    steps = Slow()
    queue = BatchQueue(steps, tmp_path, poll_s=0.02)
    for number in range(module.TENANT_BATCHES_AT_ONCE + 2):
        await queue.put("busy", f"{batch_id}-{number}")
    await until(lambda: len(running) == module.TENANT_BATCHES_AT_ONCE)
    await queue.put("quiet", f"{batch_id}-quiet")
    await until(lambda: f"{batch_id}-quiet" in running)
    assert len(running) == module.TENANT_BATCHES_AT_ONCE + 1
    steps.go.set()
    await until(lambda: len(running) == module.TENANT_BATCHES_AT_ONCE + 3)
    await until(lambda: steps.seen.count("finish") == len(running))
    await queue.close()


async def test_an_idle_server_loads_no_queue(tmp_path: Path) -> None:
    await BatchQueue(Steps(), tmp_path).close()
    assert not (tmp_path / module.DATABASE_FILE).exists()
