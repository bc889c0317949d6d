"""Citations of Anthropic's Messages, by its own client: characters of a text, blocks of a document and of a search
result, each behind the sentence that it supports."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from perilune.core import ChoiceFinished, Completed, FinishReason, TextDelta, Usage

from .conftest import Serve
from .fakes import MODEL, FakeService, Step, report

RENT = "The rent of the mill is 940 crowns a month."
ROOF = "The roof of the barn was mended by Ole in May."
TEXT = f"Geese are loud. {RENT} Rain falls often here. {ROOF}"
ON: Any = {"enabled": True}


def says(text: str) -> list[Step]:
    pieces: list[Step] = [TextDelta(0, text[at : at + 7]) for at in range(0, len(text), 7)]
    return [*pieces, ChoiceFinished(0, FinishReason.STOP), Completed(Usage(9, 5, 0), report())]


SERVICE_SAYS = "I looked. The mill's rent is 940 crowns. Ole mended the barn's roof in May."


async def asked(serve: Serve, *blocks: Any) -> tuple[list[Any], list[Any]]:
    """(citations of the whole answer, those of the stream)."""
    messages: Any = [{"role": "user", "content": [*blocks, {"type": "text", "text": "What of the mill?"}]}]
    async with serve(FakeService(script=says(SERVICE_SAYS))) as server:
        url = str(server.client.base_url).removesuffix("/v1/")
        client = anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0)
        async with client:
            whole = await client.messages.create(model=MODEL, max_tokens=9, messages=messages)
            async with client.messages.stream(model=MODEL, max_tokens=9, messages=messages) as stream:
                last = await stream.get_final_message()
    assert last.content[0].text == whole.content[0].text == SERVICE_SAYS  # type: ignore[union-attr]
    return whole.content[0].citations or [], last.content[0].citations or []  # type: ignore[union-attr]


def document(source: Any, **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, "citations": ON, **more}


async def test_characters_of_a_text(serve: Serve) -> None:
    first = document({"type": "text", "media_type": "text/plain", "data": "Nothing of note."})
    second = document({"type": "text", "media_type": "text/plain", "data": TEXT}, title="Papers")
    for found in await asked(serve, first, second):
        assert [each.type for each in found] == ["char_location"] * 2
        assert [each.cited_text for each in found] == [RENT, ROOF]
        for each in found:
            assert (each.document_index, each.document_title) == (1, "Papers")
            assert TEXT[each.start_char_index : each.end_char_index] == each.cited_text


async def test_blocks_of_a_document(serve: Serve) -> None:
    blocks = [{"type": "text", "text": text} for text in ("Geese are loud.", ROOF, RENT)]
    for found in await asked(serve, document({"type": "content", "content": blocks}, title="Notes")):
        places = [(each.type, each.start_block_index, each.end_block_index, each.cited_text) for each in found]
        assert places == [("content_block_location", 2, 3, RENT), ("content_block_location", 1, 2, ROOF)]


async def test_blocks_of_a_search_result(serve: Serve) -> None:
    def result(title: str, *texts: str) -> dict[str, Any]:
        content = [{"type": "text", "text": text} for text in texts]
        return {"type": "search_result", "source": f"https://x/{title}", "title": title, "content": content} | {
            "citations": ON
        }

    for found in await asked(serve, result("a", "Geese are loud."), result("b", RENT, ROOF)):
        assert [each.type for each in found] == ["search_result_location"] * 2
        assert [(each.search_result_index, each.source, each.title) for each in found] == [
            (1, "https://x/b", "b")
        ] * 2
        assert [each.start_block_index for each in found] == [0, 1]


@pytest.mark.parametrize("citations", [None, {"enabled": False}])
async def test_without_leave_nothing_is_cited(serve: Serve, citations: Any) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": TEXT}
    for found in await asked(serve, {"type": "document", "source": source, "citations": citations}):
        assert found == []
