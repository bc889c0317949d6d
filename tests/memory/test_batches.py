"""Rows of batches and their lines: one result a line whatever is stored twice, counts, tenants, quotes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from perilune.core import Usage
from perilune.errors import InvalidRequest, NotFound
from perilune.memory.batches import Batch, BatchStatus, BatchStore, Line, LineResult, LineState
from perilune.memory.library import Library
from perilune.memory.paging import Part
from perilune.memory.store import Store

DAY = ("24h", 86_400.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def batches(store: Store) -> BatchStore:
    return BatchStore(store, Clock())


def made(batches: BatchStore, tenant: str = "local", most_open: int = 100) -> Batch:
    return batches.create(tenant, "key-1", "/v1/chat/completions", "file-in", DAY, {"a": "b"}, None, most_open)


def running(batches: BatchStore, lines: int, tenant: str = "local") -> Batch:
    batch = made(batches, tenant)
    rows = [Line(number, f"l{number}", 10 * number, 9) for number in range(lines)]
    batches.add_lines(batch, rows, ["talk"])
    return batches.move(batch, BatchStatus.IN_PROGRESS, BatchStatus.VALIDATING, total=lines, model="m")


def test_life_of_a_batch(batches: BatchStore) -> None:
    batch = made(batches)
    assert (batch.status, batch.metadata, batch.expires_at - batch.created_at) == (
        BatchStatus.VALIDATING,
        {"a": "b"},
        86_400,
    )
    batch = running(batches, 3)
    assert batch.times.keys() == {"in_progress"}
    assert [line.number for line in batches.waiting(batch, 0, 2)] == [0, 1]
    batches.settle(batch, [LineResult(1, True, '{"one": 1}', Usage(5, 2, 3)), LineResult(0, False, '{"no": 0}')])
    assert [line.number for line in batches.waiting(batch, 0, 9)] == [2]
    batch = batches.get("local", batch.batch_id)
    assert (batch.completed, batch.failed, batch.usage) == (1, 1, Usage(5, 2, 3))
    assert list(batches.lines(batch, LineState.DONE)) == [("l1", '{"one": 1}')]
    assert list(batches.lines(batch, LineState.FAILED, LineState.WAITING)) == [("l0", '{"no": 0}'), ("l2", None)]
    ended = batches.end(batch, BatchStatus.EXPIRED, "file-out", None)
    assert (ended.status, ended.output_file_id, ended.times.keys()) == (
        BatchStatus.EXPIRED,
        "file-out",
        {"in_progress", "expired"},
    )
    assert list(batches.lines(batch, *LineState)) == []
    assert batches.end(batch, BatchStatus.COMPLETED, None, None).status is BatchStatus.EXPIRED, "it had ended"


def test_a_line_has_one_result_and_counts_once(batches: BatchStore) -> None:
    batch = running(batches, 2)
    for text in ("first", "second"):
        batches.settle(batch, [LineResult(0, True, f'"{text}"', Usage(1, 1, 0))])
    batches.settle(batch, [LineResult(0, False, '"third"')])
    batch = batches.get("local", batch.batch_id)
    assert (batch.completed, batch.failed, batch.usage) == (1, 0, Usage(1, 1, 0))
    assert list(batches.lines(batch, LineState.DONE)) == [("l0", '"first"')]


def test_a_status_begins_only_from_those_before(batches: BatchStore) -> None:
    batch = running(batches, 1)
    for _ in range(2):
        batch = batches.move(batch, BatchStatus.CANCELLING, BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
        assert batch.status is BatchStatus.CANCELLING
    first_s = batch.times["cancelling"]
    assert batches.move(batch, BatchStatus.FINALIZING, BatchStatus.IN_PROGRESS).times == {
        "in_progress": batch.times["in_progress"],
        "cancelling": first_s,
    }


def test_tenants_and_pages(batches: BatchStore) -> None:
    ids = [made(batches).batch_id for _ in range(5)]
    other = made(batches, "other")
    with pytest.raises(NotFound):
        batches.get("local", other.batch_id)
    page, more = batches.page("local", Part(2))
    assert ([each.batch_id for each in page], more) == (ids[:2:-1], True)
    page, more = batches.page("local", Part(10, page[-1].batch_id))
    assert ([each.batch_id for each in page], more) == (ids[2::-1], False)
    with pytest.raises(InvalidRequest):
        batches.page("local", Part(2, other.batch_id))
    with pytest.raises(InvalidRequest, match="haven't ended"):
        made(batches, most_open=5)
    batches.end(batches.get("local", ids[0]), BatchStatus.FAILED, None, None)
    made(batches, most_open=5)
    batches.forget_tenant("local")
    assert [each.batch_id for each in batches.unended()] == [other.batch_id]
    with pytest.raises(NotFound):
        batches.settle(page[0], [LineResult(0, True, "{}")])
    with pytest.raises(NotFound):
        batches.add_lines(page[0], [Line(0, "a", 0, 1)], [])


def test_deleting_what_is_quoted_owes_a_purge(batches: BatchStore, store: Store, tmp_path: Path) -> None:
    library = Library(store, tmp_path)
    file = library.add_file("local", "a.txt", "user_data", io.BytesIO(b"text"), 100)
    quoting, other = running(batches, 2), running(batches, 2)
    cited = json.dumps({"citations": [{"file_id": file.file_id}]}, separators=(",", ":"))
    named = json.dumps({"content": f'say {{"file_id":"{file.file_id}"}}'})
    batches.settle(quoting, [LineResult(0, True, cited)])
    batches.settle(other, [LineResult(0, True, named)])  # a text that looks like a citation is none
    assert batches.owed() == []
    library.delete_file("local", file.file_id)
    assert [each.batch_id for each in batches.owed()] == [quoting.batch_id]
    batches.settle(quoting, [LineResult(1, True, cited)])  # was answered before, and comes too late
    assert [line.number for line in batches.waiting(quoting, 0, 9)] == [1]
    batches.forget_results(batches.owed()[0])
    assert batches.owed() == []
    assert list(batches.lines(quoting, *LineState)) == []


def test_many_lines_are_read_little_by_little(batches: BatchStore) -> None:
    batch = running(batches, 5_001)
    assert [custom_id for custom_id, _ in batches.lines(batch, LineState.WAITING)] == [
        f"l{number}" for number in range(5_001)
    ]
    batches.begin_lines(batch)
    assert batches.count(batch, LineState.WAITING) == 0
