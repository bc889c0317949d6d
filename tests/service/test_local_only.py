"""Local-only documents and sessions never reach a backend elsewhere: nothing of them is in any request to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from perilune.errors import KeptHere, Overloaded
from perilune.memory.memory import Memory
from perilune.memory.sessions import Sessions
from perilune.memory.store import Store
from perilune.memory.vectors.lance import LanceIndex
from tests.service.backends.upstream import Upstream, saying, upstream
from tests.service.harness import Bench, request, running, text_of
from tests.service.test_routed import report_of, target

SECRET = "My locker at the Brill station has the number 4471."
ASKED = "Which number does my locker at the station have?"


@asynccontextmanager
async def elsewhere(home: Path) -> AsyncIterator[tuple[Bench, Upstream, Memory]]:
    """A service with real memory, and a backend `up` that serves `big` and stands in for the local model."""
    store = Store(home)
    memory = Memory(store, LanceIndex(home / "index", "none", 1), None)
    memory.start()
    try:
        async with upstream(saying("from afar")) as up:
            options = {"targets": [target(up)], "fallbacks": (("fake-1", "big"),)}
            async with running(kept=Sessions(store, memory), **options) as bench:
                yield bench, up, memory
        assert not any("4471" in json.dumps(seen.body) for seen in up.seen), "it left"
    finally:
        memory.close()
        store.close()


async def ask(bench: Bench, question: str, local_only: bool = False, **options: object) -> str:
    asked = replace(request(question, **options), local_only=local_only)  # type: ignore[arg-type]
    return text_of([event async for event in bench.service.run(asked)])


async def test_a_local_only_session_is_answered_here_or_not_at_all(tmp_path: Path) -> None:
    async with elsewhere(tmp_path) as (bench, up, _):
        assert await ask(bench, SECRET, local_only=True, session="private") == "The answer."
        await bench.service.conversations.get("local", "private")
        with pytest.raises(KeptHere, match="private is local-only"):
            await ask(bench, ASKED, model="big", session="private")
        with pytest.raises(KeptHere, match="This request"):
            await ask(bench, SECRET, local_only=True, model="big")
        bench.engine.broken = "closed"
        assert await ask(bench, "Hello.") == "from afar"  # another one's questions are answered there
        with pytest.raises(Overloaded):
            await ask(bench, ASKED, session="private")
        assert len(up.seen) == 1


async def test_its_turns_are_not_recalled_for_a_backend_and_that_is_said(tmp_path: Path) -> None:
    async with elsewhere(tmp_path) as (bench, up, _):
        await ask(bench, SECRET, local_only=True, session="private")
        await ask(bench, "My bicycle is green.", session="open")
        await bench.service.conversations.get("local", "open")
        events = await bench.ask(ASKED + " And my bicycle?", model="big", recall=("private", "open"))
        assert "green" in json.dumps(up.seen[-1].body)
        assert "local_only" in {each["code"] for each in report_of(events)["degradations"]}
        events = await bench.ask(ASKED, recall=("private", "open"))
        assert "4471" in bench.tokenizer.decode(bench.engine.specs[-1].token_ids)  # here it is


async def test_a_local_only_document_is_not_sent(tmp_path: Path) -> None:
    async with elsewhere(tmp_path) as (bench, up, memory):
        file_id = await bench.upload(SECRET * 20)
        await asyncio.to_thread(memory.locality.mark, "local", file_id, True)
        with pytest.raises(KeptHere):
            await ask(bench, ASKED, model="big", files=(file_id,))
        assert await ask(bench, ASKED, files=(file_id,)) == "The answer."
        assert not up.seen


async def test_what_is_marked_while_it_is_prepared_does_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with elsewhere(tmp_path) as (bench, up, memory):
        file_id = await bench.upload(SECRET * 20)
        text = bench.library.text

        def marking(tenant: str, which: str) -> str:
            memory.locality.mark("local", file_id, True)
            return text(tenant, which)

        monkeypatch.setattr(bench.library, "text", marking)
        with pytest.raises(KeptHere):
            await ask(bench, ASKED, model="big", files=(file_id,))
        assert not up.seen
