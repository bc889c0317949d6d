"""A question asked while a large document is still being read is answered from what is parsed, and says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perilune.core import Citation, Completed, Event, FileStatus
from perilune.memory.library import Library
from perilune.memory.store import Store
from tests.service.harness import Bench, running

OCTAVE = Path("/usr/share/doc/octave/octave.pdf")
PAGES = 1158
ASKED = "How is a matrix entered, and who may copy the program?"


def covered(events: list[Event]) -> int:
    """The pages that the answer says it was made from; all of them where it says nothing."""
    report = next(event.report for event in events if isinstance(event, Completed))
    said = [each.reason for each in report.degradations if each.code == "partial_ingest"]
    if not said:
        return PAGES
    found = re.fullmatch(r"octave.pdf is still being read: pages parsed ([0-9,]+) of 1,158.", said[0])
    assert found is not None, said
    pages = int(found[1].replace(",", ""))
    cited = [each.page for each in report.citations if isinstance(each, Citation)]
    assert cited
    assert min(cited) >= 1
    return pages


async def ask(bench: Bench, file_id: str) -> tuple[int, int]:
    """(pages that the answer covers, pages parsed when it had come)."""
    events = await bench.ask(ASKED, files=(file_id,), deadline_s=0.01, max_tokens=4)
    return covered(events), (await bench.documents.get("local", file_id)).pages_parsed


@pytest.mark.timeout(300)
async def test_questions_during_an_ingest_are_answered_from_what_is_read(tmp_path: Path) -> None:
    assert OCTAVE.exists(), f"{OCTAVE} is missing: apt-get install octave-doc"
    store = Store(tmp_path)
    async with running(library=Library(store, tmp_path), max_upload_bytes=64 * 1024**2) as bench:
        with OCTAVE.open("rb") as data:
            record = await bench.documents.upload("local", OCTAVE.name, "assistants", data)
        first, parsed = await ask(bench, record.file_id)
        assert 1 <= first <= parsed
        assert first < PAGES, "it waited for the whole document"
        prompt = bench.tokenizer.decode(bench.engine.specs[-1].token_ids)
        assert "[octave.pdf, page " in prompt
        while (await bench.documents.get("local", record.file_id)).status is FileStatus.PARSING:
            pages, parsed = await ask(bench, record.file_id)
            assert first <= pages <= parsed
            first = pages
        pages, _ = await ask(bench, record.file_id)
        assert pages == PAGES
    store.close()
