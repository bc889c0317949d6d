"""/v1/vector_stores, asked by the unmodified OpenAI client, over real files, rows and search."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from perilune.memory.library import Library
from perilune.memory.memory import Memory
from perilune.memory.store import Store
from perilune.memory.vector_stores import VectorStores
from perilune.memory.vectors.lance import LanceIndex
from perilune.service.vector_stores import VectorStoreService
from tests.api.conftest import Serve
from tests.api.fakes import FakeDocuments, FakeService
from tests.api.test_sessions import KEYS, as_
from tests.memory.conftest import ingest

PATH = "/v1/vector_stores"
RENT, ROOF = "The rent of the mill is 940 crowns a month.", "The roof of the barn was mended by Ole in May."


class Text(FakeDocuments):
    """The library's texts."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.library = library

    async def text(self, tenant: str, file_id: str) -> str:
        return self.library.text(tenant, file_id)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    store = Store(tmp_path)
    opened = Memory(store, LanceIndex(tmp_path / "index", "none", 1), None)
    yield opened
    opened.close()
    store.close()


@pytest.fixture
def library(memory: Memory, tmp_path: Path) -> Library:
    return Library(memory._store, tmp_path, memory=memory)


@pytest.fixture
def service(memory: Memory, library: Library) -> FakeService:
    stores = VectorStoreService(VectorStores(memory._store), library)
    return FakeService(keys=dict(KEYS), vector_stores=stores, documents=Text(library))


@pytest.fixture
def ids(library: Library) -> list[str]:
    return [
        ingest(library, f"{text} {'Geese are loud. ' * 60}".encode(), f"{name}.txt", "acme").file_id
        for name, text in (("rent", RENT), ("roof", ROOF))
    ]


def client(server: Any, key: str = "a") -> openai.AsyncOpenAI:
    return server.client.with_options(api_key=key)  # type: ignore[no-any-return]


async def test_a_store_through_the_client(serve: Serve, service: FakeService, ids: list[str]) -> None:
    async with serve(service) as server:
        stores = client(server).vector_stores
        made = await stores.create(
            name="Mill",
            description="Papers",
            file_ids=ids[:1],
            expires_after={"anchor": "last_active_at", "days": 7},
            metadata={"team": "blue"},
            chunking_strategy={"type": "auto"},
        )
        assert (made.name, made.status, made.metadata) == ("Mill", "completed", {"team": "blue"})
        assert made.file_counts.to_dict() == {
            "in_progress": 0,
            "completed": 1,
            "failed": 0,
            "cancelled": 0,
            "total": 1,
        }
        assert made.expires_at == (made.last_active_at or 0) + 7 * 86400
        assert await stores.retrieve(made.id) == made
        changed = await stores.update(made.id, name="Barn", expires_after=None)
        assert (changed.name, changed.expires_after, changed.metadata) == ("Barn", None, {"team": "blue"})
        others = [(await stores.create()).id for _ in range(4)]
        listed = [each.id async for each in stores.list(limit=2)]
        assert sorted(listed) == sorted([*others, made.id])
        page = await stores.list(limit=2, order="asc", after=made.id)
        assert len(page.data) == 2
        assert (await stores.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await stores.retrieve(made.id)


async def test_files_and_batches_through_the_client(serve: Serve, service: FakeService, ids: list[str]) -> None:
    async with serve(service) as server:
        stores = client(server).vector_stores
        made = (await stores.create(name="Mill")).id
        file = await stores.files.create_and_poll(
            ids[0], vector_store_id=made, attributes={"year": 2024, "draft": True, "by": "Ole"}
        )
        assert (file.status, file.attributes) == ("completed", {"year": 2024, "draft": True, "by": "Ole"})
        assert file.chunking_strategy is not None
        assert file.chunking_strategy.type == "other"
        assert file.usage_bytes > 0
        changed = await stores.files.update(ids[0], vector_store_id=made, attributes={"year": 2025})
        assert changed.attributes == {"year": 2025}
        assert await stores.files.retrieve(ids[0], vector_store_id=made) == changed
        text = [each.text async for each in await stores.files.content(ids[0], vector_store_id=made)]
        assert (text[0] or "").startswith(RENT)
        batch = await stores.file_batches.create_and_poll(
            made, files=[{"file_id": ids[0], "attributes": {"n": 1}}, {"file_id": ids[1]}]
        )
        assert (batch.status, batch.file_counts.completed) == ("completed", 2)
        inside = [each async for each in stores.file_batches.list_files(batch.id, vector_store_id=made)]
        assert {each.id: each.attributes for each in inside} == {ids[0]: {"n": 1}, ids[1]: {}}
        assert (await stores.file_batches.cancel(batch.id, vector_store_id=made)).status == "completed"
        assert (await stores.file_batches.create(made, file_ids=ids, attributes={"n": 2})).file_counts.total == 2
        assert [each.id async for each in stores.files.list(made, filter="failed")] == []
        assert len([each async for each in stores.files.list(made, filter="completed", limit=1)]) == 2
        assert (await stores.files.delete(ids[0], vector_store_id=made)).deleted
        assert (await stores.retrieve(made)).file_counts.total == 1


async def test_search_through_the_client(serve: Serve, service: FakeService, ids: list[str]) -> None:
    async with serve(service) as server:
        stores = client(server).vector_stores
        made = (await stores.create(file_ids=ids[:1])).id
        await stores.files.create(made, file_id=ids[1], attributes={"year": 2025})
        asked = "What is the rent of the mill?"
        found = (await stores.search(made, query=asked, rewrite_query=True)).data
        assert (found[0].file_id, found[0].filename) == (ids[0], "rent.txt")
        assert RENT in found[0].content[0].text
        assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)
        assert all(0 <= each.score <= 1 for each in found)
        place = found[0].model_extra or {}
        assert (place["page"], place["start"]) == (1, 0)
        only = (await stores.search(made, query=asked, filters={"type": "gte", "key": "year", "value": 2025})).data
        assert {each.file_id for each in only} <= {ids[1]}
        assert len((await stores.search(made, query=asked, max_num_results=1)).data) == 1
        both = (await stores.search(made, query=[asked, "Who mended the roof of the barn?"])).data
        assert {each.file_id for each in both[:2]} == set(ids)
        sure = await stores.search(
            made, query=asked, ranking_options={"ranker": "auto", "score_threshold": found[0].score}
        )
        assert {each.file_id for each in sure.data} == {ids[0]}
        raw = await server.http.post(f"{PATH}/{made}/search", json={"query": asked}, **as_("r"))
        assert (await raw.json())["search_query"] == [asked]
        assert (await stores.search((await stores.create()).id, query=asked)).data == []


async def test_another_tenant_finds_nothing_and_a_reader_writes_nothing(
    serve: Serve, service: FakeService, ids: list[str]
) -> None:
    async with serve(service) as server:
        made = (await client(server).vector_stores.create(file_ids=ids)).id
        batch = (await client(server).vector_stores.file_batches.create(made, file_ids=ids)).id
        at = f"{PATH}/{made}"
        calls: list[tuple[str, str, Any]] = [
            ("POST", at, {"name": "x"}),
            ("DELETE", at, None),
            ("POST", f"{at}/files", {"file_id": ids[0]}),
            ("POST", f"{at}/files/{ids[0]}", {"attributes": {}}),
            ("DELETE", f"{at}/files/{ids[0]}", None),
            ("POST", f"{at}/file_batches", {"file_ids": ids}),
            ("POST", f"{at}/file_batches/{batch}/cancel", None),
        ]
        reads: list[tuple[str, str, Any]] = [
            ("GET", at, None),
            ("GET", f"{at}/files", None),
            ("GET", f"{at}/files/{ids[0]}", None),
            ("GET", f"{at}/files/{ids[0]}/content", None),
            ("GET", f"{at}/file_batches/{batch}", None),
            ("GET", f"{at}/file_batches/{batch}/files", None),
            ("POST", f"{at}/search", {"query": "rent"}),
        ]
        for method, path, body in calls:
            assert (await server.http.request(method, path, json=body, **as_("r"))).status == 403
        for method, path, body in calls + reads:
            reply = await server.http.request(method, path, json=body, **as_("b"))
            assert reply.status == 404, path
            assert (await reply.json())["error"]["code"] == "not_found"
        for method, path, body in reads:
            assert (await server.http.request(method, path, json=body, **as_("r"))).status == 200
        assert (await server.http.post(PATH, json={"file_ids": ids}, **as_("b"))).status == 404
        assert (await (await server.http.get(PATH, **as_("b"))).json())["data"] == []


STATIC = {"type": "static", "static": {"max_chunk_size_tokens": 800, "chunk_overlap_tokens": 400}}


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("", {"chunking_strategy": STATIC}, "chunking_strategy", "unsupported_parameter"),
        ("", {"metadata": {"a": 1}}, "metadata.a", "invalid_request"),
        ("", {"metadata": {str(at): "x" for at in range(17)}}, "metadata", "invalid_request"),
        ("", {"expires_after": {"anchor": "created_at", "days": 1}}, "expires_after.anchor", "invalid_request"),
        ("", {"expires_after": {"anchor": "last_active_at", "days": 0}}, "expires_after.days", "invalid_request"),
        ("", {"name": "x" * 257}, "name", "invalid_request"),
        ("/files", {}, "file_id", "invalid_request"),
        ("/files", {"file_id": "f", "attributes": {"a": None}}, "attributes.a", "invalid_request"),
        ("/files", {"file_id": "f", "chunking_strategy": STATIC}, "chunking_strategy", "unsupported_parameter"),
        ("/file_batches", {}, "file_ids", "invalid_request"),
        ("/file_batches", {"file_ids": ["f"], "files": [{"file_id": "f"}]}, "file_ids", "invalid_request"),
        ("/search", {"query": ""}, "query[0]", "invalid_request"),
        ("/search", {"query": "x", "max_num_results": 51}, "max_num_results", "invalid_request"),
        ("/search", {"query": "x", "filters": {"type": "eq", "key": "a"}}, "filters", "invalid_request"),
        (
            "/search",
            {"query": "x", "filters": {"type": "in", "key": "a", "value": 1}},
            "filters",
            "invalid_request",
        ),
        ("/search", {"query": "x", "filters": {"type": "and"}}, "filters", "invalid_request"),
        ("/search", {"query": "x", "filters": {"type": "like", "key": "a"}}, "filters.type", "invalid_request"),
        (
            "/search",
            {"query": "x", "ranking_options": {"hybrid_search": {"embedding_weight": 1, "text_weight": 0}}},
            "ranking_options.hybrid_search",
            "unsupported_parameter",
        ),
    ],
)
async def test_bad_bodies(
    serve: Serve, service: FakeService, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    async with serve(service) as server:
        at = f"{PATH}/{(await client(server).vector_stores.create()).id}" if path else PATH
        reply = await server.http.post(f"{at}{path}", json=body, **as_("a"))
        assert reply.status == 400
        error = (await reply.json())["error"]
        assert (error["param"], error["code"]) == (param, code)


async def test_deep_and_long_filters_are_refused(serve: Serve, service: FakeService) -> None:
    leaf: dict[str, Any] = {"type": "eq", "key": "a", "value": 1}
    deep = leaf
    for _ in range(8):
        deep = {"type": "or", "filters": [deep]}
    async with serve(service) as server:
        made = (await client(server).vector_stores.create()).id
        for bad in (deep, {"type": "and", "filters": [{"type": "or", "filters": [leaf] * 40}] * 2}):
            reply = await server.http.post(f"{PATH}/{made}/search", json={"query": "x", "filters": bad}, **as_("a"))
            assert reply.status == 400
            assert (await reply.json())["error"]["param"] == "filters"
        for query in ("filter=lost", "limit=101", "order=no", "after=file-x"):
            assert (await server.http.get(f"{PATH}/{made}/files?{query}", **as_("a"))).status == 400
