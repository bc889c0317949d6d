"""Ingest: parsed, prefilled only where a prompt can reuse it, interruptible, deleted without a trace."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace

import pytest

from perilune.core import FileStatus, ServiceClass, StageStarted
from perilune.errors import NotFound, TooLarge, UnsupportedDocument
from perilune.service.service import Service
from tests.service.fakes import FakeEngine, MemoryLibrary, upload_bytes
from tests.service.harness import Bench, request, running

SMALL = "The late fee is two percent. " * 20


async def test_a_document_that_fits_is_prefilled_at_idle_priority(bench: Bench) -> None:
    file_id = await bench.upload(SMALL)
    record = await bench.documents.get("local", file_id)
    assert record.status is FileStatus.PROCESSED
    assert record.tokens == len(SMALL)
    (spec,) = bench.engine.specs
    assert spec.prefill_only
    assert spec.service_class is ServiceClass.P2_BATCH
    assert spec.persist_owner == file_id
    assert bench.engine.owners() == {file_id}


async def test_a_document_over_the_window_is_only_indexed(bench: Bench) -> None:
    file_id = await bench.upload("Many words here. " * 1000)
    record = await bench.documents.get("local", file_id)
    assert record.status is FileStatus.PROCESSED
    assert record.tokens == 17_000
    assert bench.engine.specs == [], "KV that no prompt can reuse was computed"


async def test_the_same_bytes_again_cost_no_prefill(bench: Bench) -> None:
    await bench.upload(SMALL, "a.txt")
    computed = bench.engine.computed_tokens
    await bench.upload(SMALL, "renamed.txt")
    assert bench.engine.computed_tokens - computed <= 96, "only the end with the name may differ"


async def test_an_unreadable_document_ends_in_error(bench: Bench) -> None:
    file_id = await bench.upload("BROKEN")
    record = await bench.documents.get("local", file_id)
    assert record.status is FileStatus.ERROR
    assert record.error == "The file is damaged."


async def test_a_failed_prefill_leaves_a_searchable_document() -> None:
    async with running() as bench:
        bench.engine.fail = "out of blocks"
        file_id = await bench.upload(SMALL)
        assert (await bench.documents.get("local", file_id)).status is FileStatus.PROCESSED


async def test_a_fault_of_ours_ends_in_error_and_not_in_silence(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*args: object) -> None:
        raise RuntimeError("disk on fire at /secret")

    monkeypatch.setattr(bench.library, "parse", explode)
    file_id = await bench.upload(SMALL)
    record = await bench.documents.get("local", file_id)
    assert record.status is FileStatus.ERROR
    assert "secret" not in (record.error or "")
    assert record.error_code == "failed"


async def test_a_full_engine_only_delays_ingest() -> None:
    async with running(engine=FakeEngine(queue_limit=1)) as bench:
        bench.engine.hold.clear()
        asking = asyncio.create_task(bench.ask("Hello?"))
        while not bench.engine.specs:
            await asyncio.sleep(0.005)
        file_id = await bench.upload(SMALL, wait=False)
        await asyncio.sleep(0.05)
        bench.engine.hold.set()
        await asking
        await bench.documents.settled()
        assert bench.engine.owners() == {file_id}


@pytest.mark.parametrize("how", ["fault", "closed"])
async def test_a_dead_engine_is_not_waited_for(bench: Bench, how: str) -> None:
    assert await bench.service.ready()
    bench.engine.broken = how
    assert not await bench.service.ready()
    file_id = await asyncio.wait_for(bench.upload(SMALL), 20)
    assert (await bench.documents.get("local", file_id)).status is FileStatus.PROCESSED


async def test_deleting_takes_everything_along(bench: Bench) -> None:
    first = await bench.upload(SMALL, "a.txt")
    second = await bench.upload("Another text. " * 30, "b.txt")
    await bench.ask("What is the fee?", files=(first, second))
    assert bench.engine.owners() == {first, second, f"{first}+{second}"}
    await bench.documents.delete("local", second)
    assert bench.engine.owners() == {first}, "KV of both together goes with either"
    with pytest.raises(NotFound):
        await bench.documents.get("local", second)
    await bench.documents.delete("local", first)
    assert bench.engine.owners() == set()


async def test_a_question_that_a_deletion_overtakes_leaves_no_kv(bench: Bench) -> None:
    first, second = await bench.upload(SMALL, "a.txt"), await bench.upload("Another text. " * 30, "b.txt")

    async def ask_and_delete() -> None:
        async with aclosing(bench.service.run(request("What?", files=(first, second)))) as events:
            async for event in events:
                if event == StageStarted("queued"):
                    await bench.documents.delete("local", first)

    with pytest.raises(NotFound):
        await ask_and_delete()
    assert bench.engine.owners() == {second}
    assert {owner for owner in bench.engine.ram.values() if owner} == {second}


async def test_kv_that_a_killed_deletion_left_goes_at_the_next_start(bench: Bench) -> None:
    file_id = await bench.upload(SMALL)
    await bench.service.close()
    bench.engine.disk |= {b"1" * 32: {"file-gone"}, b"2" * 32: {f"{file_id}+file-gone"}}
    await bench.start()
    assert bench.engine.owners() == {file_id}


@pytest.mark.parametrize("phase", ["parse", "prefill"])
async def test_deleting_stops_a_running_ingest(phase: str) -> None:
    async with running(library=MemoryLibrary(page_s=0.01)) as bench:
        if phase == "prefill":
            bench.engine.hold.clear()
        file_id = await bench.upload("\f".join([SMALL] * 8), wait=False)
        wanted = FileStatus.PARSING if phase == "parse" else FileStatus.PREFILLING
        while (await bench.documents.get("local", file_id)).status is not wanted or (
            phase == "prefill" and not bench.engine.specs
        ):
            await asyncio.sleep(0.005)
        await asyncio.wait_for(bench.documents.delete("local", file_id), 20)
        await bench.documents.settled()
        assert bench.library.records == {}
        assert bench.engine.owners() == set()
        await asyncio.to_thread(bench.engine.assert_clean)
        bench.engine.hold.set()


async def test_parsers_leave_the_threads_of_requests_alone(bench: Bench) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    bench.library.gate.clear()
    for _ in range(2):
        await bench.upload(SMALL, wait=False)
    await asyncio.sleep(0.05)
    await asyncio.wait_for(bench.service.authenticate(None), 20)
    bench.library.gate.set()
    await bench.documents.settled()


async def test_a_silent_parser_delays_neither_deletion_nor_shutdown(bench: Bench) -> None:
    bench.library.gate.clear()
    deleted = await bench.upload(SMALL, wait=False)
    kept = await bench.upload(SMALL, wait=False)
    await asyncio.sleep(0.05)
    await asyncio.wait_for(bench.documents.delete("local", deleted), 20)
    await asyncio.wait_for(bench.service.close(), 20)
    assert bench.library.records[kept].status not in (FileStatus.ERROR, FileStatus.PROCESSED)
    bench.library.gate.set()


async def test_an_interrupted_ingest_is_resumed_at_the_next_start() -> None:
    async with running(library=MemoryLibrary(page_s=0.01)) as bench:
        file_id = await bench.upload("\f".join([SMALL] * 10), wait=False)
        while not bench.library.parsed[file_id]:
            await asyncio.sleep(0.005)
        await asyncio.wait_for(bench.service.close(), 20)
        done = len(bench.library.parsed[file_id])
        assert 0 < done < 10
        bench.library.page_s = 0.0
        assert isinstance(bench.service, Service)
        await bench.start()
        await bench.documents.settled()
        assert (await bench.documents.get("local", file_id)).status is FileStatus.PROCESSED
        assert len(bench.library.parsed[file_id]) == 10
        assert bench.engine.owners() == {file_id}


async def test_kv_that_was_lost_is_computed_again_at_the_next_start(bench: Bench) -> None:
    kept, lost = await bench.upload(SMALL, "a.txt"), await bench.upload("Another text. " * 30, "b.txt")
    await bench.upload("Many words here. " * 1000)
    before = len(bench.engine.specs)
    await bench.service.close()
    bench.engine.restart()
    bench.engine.forget(lost)
    await bench.start()
    await bench.documents.settled()
    assert [spec.persist_owner for spec in bench.engine.specs[before:]] == [lost]
    assert bench.engine.owners() == {kept, lost}


async def test_no_more_is_computed_at_a_start_than_is_kept() -> None:
    async with running(capacity=2000) as bench:
        files = [await bench.upload(f"{letter} text. " * 100, f"{letter}.txt") for letter in "abcde"]
        await bench.service.close()
        bench.engine.restart()
        bench.engine.disk.clear()
        await bench.start()
        await bench.documents.settled()
        assert bench.engine.owners() == set(files[-2:]), "the newest ones"


async def test_another_model_counts_again(bench: Bench) -> None:
    file_id = await bench.upload(SMALL)
    await bench.service.close()
    bench.library.records[file_id] = replace(bench.library.records[file_id], tokens=None)
    bench.engine.restart()
    await bench.start()
    await bench.documents.settled()
    record = await bench.documents.get("local", file_id)
    assert (record.tokens, record.status) == (len(SMALL), FileStatus.PROCESSED)


async def test_files_belong_to_their_tenant(bench: Bench) -> None:
    file_id = await bench.upload(SMALL, tenant="a")
    for call in (bench.documents.get, bench.documents.delete, bench.documents.content, bench.documents.text):
        with pytest.raises(NotFound):
            await call("b", file_id)
    assert await bench.documents.list("b") == []
    assert [item.file_id for item in await bench.documents.list("a")] == [file_id]
    assert (await bench.documents.content("a", file_id)).read() == SMALL.encode()
    assert await bench.documents.text("a", file_id) == SMALL


async def test_a_running_ingest_is_hidden_from_other_tenants() -> None:
    async with running(library=MemoryLibrary(page_s=0.02)) as bench:
        file_id = await bench.upload("\f".join([SMALL] * 5), tenant="a", wait=False)
        with pytest.raises(NotFound):
            await bench.documents.get("b", file_id)
        await bench.documents.settled()


async def test_uploads_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kept: object) -> None:
        raise TooLarge(f"More than {args[4]} bytes.")

    monkeypatch.setattr(bench.library, "add_file", refuse)
    with pytest.raises(TooLarge, match="1000000"):
        await bench.upload("x")


async def test_files_of_batches_are_no_documents(bench: Bench) -> None:
    record = await bench.documents.upload("local", "in.jsonl", "batch", upload_bytes("text"), lasts_s=60.0)
    await bench.documents.settled()
    with pytest.raises(UnsupportedDocument, match="uploaded for batch"):
        await bench.ask("What is it?", files=(record.file_id,))
