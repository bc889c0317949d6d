"""The hosted tool file_search of Responses: its item, its events, and what of it is asked, by OpenAI's client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from perilune.core import (
    AttributeComparison,
    ChoiceFinished,
    Completed,
    FileSearch,
    FileSearched,
    FileSearchStarted,
    FinishReason,
    StoreHit,
    TextDelta,
    ToolMode,
    Usage,
)

from .conftest import Serve
from .fakes import MODEL, FakeService, opening, report

HIT = StoreHit("file-1", "moon.pdf", {"year": 2024}, 0.75, 3, 10, 30, "the far side is dark")
STEPS = [
    FileSearchStarted(("What is it?",)),
    FileSearched((HIT,)),
    *opening(),
    TextDelta(0, "Dark."),
    ChoiceFinished(0, FinishReason.STOP),
    Completed(Usage(9, 1, 0), report()),
]
TOOL: Any = {
    "type": "file_search",
    "vector_store_ids": ["vs_1", "vs_2"],
    "filters": {"type": "eq", "key": "year", "value": 2024},
    "max_num_results": 5,
    "ranking_options": {"ranker": "auto", "score_threshold": 0.5},
}
ASK: dict[str, Any] = {"model": MODEL, "input": "What is it?", "tools": [TOOL]}
RESULTS: Any = ["file_search_call.results"]


async def test_whole_and_streamed_searches_are_equal(serve: Serve) -> None:
    service = FakeService(script=STEPS)
    async with serve(service) as server:
        whole = await server.client.responses.create(**ASK, include=RESULTS)
        events = [
            event async for event in await server.client.responses.create(**ASK, include=RESULTS, stream=True)
        ]
    assert [event.type for event in events][2:8] == [
        "response.output_item.added",
        "response.file_search_call.in_progress",
        "response.file_search_call.searching",
        "response.file_search_call.completed",
        "response.output_item.done",
        "response.output_item.added",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    for answer in (whole, last.response):
        search, message = answer.output
        assert search.type == "file_search_call"
        assert (search.status, search.queries) == ("completed", ["What is it?"])
        (result,) = search.results or []
        assert (result.file_id, result.filename, result.score, result.text) == (
            "file-1",
            "moon.pdf",
            0.75,
            "the far side is dark",
        )
        assert result.attributes == {"year": 2024}
        assert message.type == "message"
        assert answer.output_text == "Dark."
    added = next(event for event in events if event.type == "response.output_text.annotation.added")
    assert added.output_index == 1
    wanted = FileSearch(("vs_1", "vs_2"), AttributeComparison("year", "eq", 2024), 5, 0.5)
    assert [request.file_search for request in service.requests] == [wanted, wanted]
    assert not service.requests[0].tools.offered


async def test_results_are_shown_where_they_are_included(serve: Serve) -> None:
    async with serve(FakeService(script=STEPS)) as server:
        search = (await server.client.responses.create(**ASK)).output[0]
    assert search.type == "file_search_call"
    assert search.results is None


FUNCTION: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


@pytest.mark.parametrize(
    ("tools", "choice", "searches", "mode"),
    [
        ([TOOL], "auto", True, ToolMode.AUTO),
        ([TOOL], "required", True, ToolMode.AUTO),
        ([TOOL], {"type": "file_search"}, True, ToolMode.AUTO),
        ([TOOL], "none", False, None),
        ([TOOL, FUNCTION], "required", True, ToolMode.REQUIRED),
        ([TOOL, FUNCTION], {"type": "file_search"}, True, ToolMode.NONE),
        ([TOOL, FUNCTION], {"type": "function", "name": "add"}, True, ToolMode.REQUIRED),
    ],
)
async def test_what_a_choice_means(
    serve: Serve, tools: list[Any], choice: Any, searches: bool, mode: ToolMode | None
) -> None:
    service = FakeService(script=STEPS)
    async with serve(service) as server:
        await server.client.responses.create(model=MODEL, input="x", tools=tools, tool_choice=choice)
    (request,) = service.requests
    assert (request.file_search is not None) is searches
    if mode is not None:
        assert request.tools.mode is mode


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"vector_store_ids": []}, "vector_store_ids"),
        ({"vector_store_ids": None}, "vector_store_ids"),
        ({"max_num_results": 51}, "max_num_results"),
        ({"filters": {"type": "and"}}, "filters"),
        ({"ranking_options": {"hybrid_search": {"text_weight": 1}}}, "ranking_options.hybrid_search"),
    ],
)
async def test_bad_searches_are_refused(serve: Serve, change: dict[str, Any], param: str) -> None:
    async with serve() as server:
        with pytest.raises(openai.BadRequestError) as refused:
            await server.client.responses.create(model=MODEL, input="x", tools=[{**TOOL, **change}])
        assert refused.value.param == param
        with pytest.raises(openai.BadRequestError):
            await server.client.responses.create(model=MODEL, input="x", tools=[TOOL, TOOL])


async def test_a_search_that_was_made_is_read_over(serve: Serve) -> None:
    service = FakeService(script=STEPS)
    async with serve(service) as server:
        first = await server.client.responses.create(**ASK, store=False)
        items: Any = [*(item.to_dict() for item in first.output), {"role": "user", "content": "And then?"}]
        await server.client.responses.create(model=MODEL, input=items)
    assert [message.text for message in service.requests[-1].messages] == ["Dark.", "And then?"]
