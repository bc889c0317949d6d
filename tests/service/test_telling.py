"""What a session keeps of an answer, however that ends: complete, stopped, failed, or before its first word."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from perilune.core import ReasoningDelta, TextDelta
from perilune.errors import InternalError, NotFound
from perilune.memory.indexer import Indexer
from perilune.memory.memory import Memory
from perilune.memory.sessions import Sessions
from perilune.memory.store import Store
from perilune.memory.vectors.lance import LanceIndex
from perilune.service.telling import Telling
from tests.service.fakes import FakeEngine
from tests.service.harness import Bench, request, running

FACT = "My locker at the Brill station has the number 4471."


class Kept:
    def __init__(self, bench: Bench, sessions: Sessions) -> None:
        self.bench, self.sessions = bench, sessions

    async def told(self, session: str = "s") -> list[tuple[str, str]]:
        await self.bench.service.conversations.settled("local", [session])
        return [(turn.speaker, turn.text) for turn in self.sessions.turns("local", session, 0, 100)]

    def details(self, turn: int = 1, session: str = "s") -> dict[str, Any]:
        """How the answer to a question came about."""
        return self.sessions.answers("local", session, turn, turn)[turn][1]


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    store = Store(tmp_path)
    index = LanceIndex(tmp_path / "index", "none", 1)
    memory = Memory(store, index, None, indexer=Indexer(store, index, None))
    sessions = Sessions(store, memory)
    try:
        async with running(kept=sessions, engine=FakeEngine(token_s=0.01)) as bench:
            yield Kept(bench, sessions)
    finally:
        memory.close()
        store.close()


async def listen(kept: Kept, letters: int, **options: Any) -> str:
    """Ask, and leave after so many letters; what was heard."""
    heard = ""
    async with aclosing(kept.bench.service.run(request("What is it?", session="s", **options))) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                heard += event.text
            if len(heard) >= letters:
                break
    return heard


async def test_a_complete_answer_keeps_its_card(kept: Kept) -> None:
    await kept.bench.ask(FACT, session="s")
    await kept.bench.ask("Which number does my locker have?", session="s", recall=("s",))
    assert len(await kept.told()) == 4
    details = kept.details(3)
    assert details["finish_reason"] == "stop"
    assert details["total_s"] > 0
    assert "reasoning" not in details
    assert details["usage"]["completion_tokens"] > 0
    report = details["perilune"]
    assert report["plan"] == "full"
    assert report["tokens"]["dropped"] == 0
    assert report["citations"][0]["quote"] == FACT
    assert (report["citations"][0]["session"], report["citations"][0]["turn"]) == ("s", 1)


async def test_a_stopped_answer_is_kept_and_marked(kept: Kept) -> None:
    heard = await listen(kept, 4)
    assert await kept.told() == [("user", "What is it?"), ("assistant", heard)]
    assert len(heard) < len("The answer.")
    details = kept.details()
    assert (details["finish_reason"], details["usage"]) == ("cancelled", None)
    assert details["perilune"]["plan"] == "full"


async def test_a_cancelled_task_is_a_stopped_answer(kept: Kept) -> None:
    task = asyncio.create_task(listen(kept, 1_000))
    while not kept.bench.engine.specs:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.06)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    told = await kept.told()
    assert told[0] == ("user", "What is it?")
    assert "The answer.".startswith(told[1][1])
    assert kept.details()["finish_reason"] == "cancelled"


async def test_nothing_said_nothing_kept(kept: Kept) -> None:
    assert await listen(kept, 0) == ""
    with pytest.raises(NotFound):
        await kept.told()


async def test_a_failed_answer_is_kept_and_marked(kept: Kept) -> None:
    sessions, asked = kept.bench.service.conversations, request("What is it?", session="s")
    visit = sessions.visit("local", "s")

    def fail() -> None:
        with Telling(sessions, visit, asked, "What is it?", time.monotonic) as telling:
            for thought in ("What is ", "it?"):
                telling.see(ReasoningDelta(0, thought))
            telling.see(TextDelta(0, "The an"))
            raise InternalError("The engine failed.")

    with pytest.raises(InternalError):
        fail()
    assert await kept.told() == [("user", "What is it?"), ("assistant", "The an")]
    assert kept.details()["finish_reason"] == "error"
    assert kept.details()["reasoning"] == "What is it?"


async def test_of_a_deleted_session_nothing_comes_back(kept: Kept) -> None:
    await kept.bench.ask(FACT, session="s")
    heard = ""
    async with aclosing(kept.bench.service.run(request("What is it?", session="s"))) as events:
        async for event in events:
            heard += event.text if isinstance(event, TextDelta) else ""
            if heard:
                await kept.bench.service.conversations.delete("local", "s")
                break
    with pytest.raises(NotFound):
        await kept.told()
