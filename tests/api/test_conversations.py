"""OpenAI's Conversations, by the unmodified client, over a scripted service and a real database."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from perilune.service.archive import Archive
from perilune.service.ports import Caller

from .conftest import Serve
from .fakes import MODEL, WORDS, FakeService

SAID = "".join(WORDS)
HELLO: Any = {"type": "message", "role": "user", "content": "Hello."}


async def test_a_conversation_is_read_and_added_to(serve: Serve, archive: Archive) -> None:
    async with serve(FakeService(responses=archive)) as server:
        talks, create = server.client.conversations, server.client.responses.create
        talk = await talks.create(metadata={"topic": "rivers"}, items=[HELLO])
        assert (talk.object, talk.metadata) == ("conversation", {"topic": "rivers"})
        first = await create(model=MODEL, input="What is it?", conversation=talk.id)
        assert first.conversation is not None
        assert first.conversation.id == talk.id
        stream = await create(model=MODEL, input="So?", conversation=talk.id, stream=True)
        assert [event.type async for event in stream][-1] == "response.completed"
        await create(model=MODEL, input="And unkept?", conversation={"id": talk.id}, store=False)
        said = [(message.role, message.text) for message in server.service.requests[-1].messages]
        assert said == [
            ("user", "Hello."),
            ("user", "What is it?"),
            ("assistant", SAID),
            ("user", "So?"),
            ("assistant", SAID),
            ("user", "And unkept?"),
        ]
        found = [item async for item in talks.items.list(talk.id, order="asc", limit=2)]
        roles = [getattr(item, "role", None) for item in found]
        assert roles == ["user", "user", "assistant", "user", "assistant", "user", "assistant"]
        assert len({item.id for item in found}) == 7
        newest = await talks.items.list(talk.id, limit=1)
        assert (newest.data[0].id, newest.has_more) == (found[-1].id, True)


async def test_items_and_metadata_change(serve: Serve, archive: Archive) -> None:
    async with serve(FakeService(responses=archive)) as server:
        talks = server.client.conversations
        talk = await talks.create()
        added = await talks.items.create(talk.id, items=[HELLO, {**HELLO, "content": "Again."}])
        assert [item.content[0].text for item in added.data] == ["Hello.", "Again."]  # type: ignore[union-attr]
        first = await talks.items.retrieve(added.data[0].id or "", conversation_id=talk.id)
        assert (first.type, first.status) == ("message", "completed")  # type: ignore[union-attr]
        assert (await talks.items.delete(first.id or "", conversation_id=talk.id)).id == talk.id
        assert len((await talks.items.list(talk.id)).data) == 1
        assert (await talks.update(talk.id, metadata={"a": "b"})).metadata == {"a": "b"}
        assert (await talks.retrieve(talk.id)).metadata == {"a": "b"}
        assert (await talks.delete(talk.id)).deleted
        for call in (talks.retrieve(talk.id), talks.delete(talk.id), talks.items.create(talk.id, items=[HELLO])):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.NotFoundError):
            await server.client.responses.create(model=MODEL, input="So?", conversation=talk.id)


async def test_another_tenants_conversation_is_not_found(serve: Serve, archive: Archive) -> None:
    keys = {"any": Caller("local", "user"), "other": Caller("bob", "user"), "reader": Caller("local", "read-only")}
    async with serve(FakeService(responses=archive, keys=keys)) as server:
        talk = await server.client.conversations.create(items=[HELLO])
        others = server.client.with_options(api_key="other")
        for call in (
            others.conversations.retrieve(talk.id),
            others.conversations.update(talk.id, metadata={}),
            others.conversations.delete(talk.id),
            others.conversations.items.create(talk.id, items=[HELLO]),
            others.responses.create(model=MODEL, input="So?", conversation=talk.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        reader = server.client.with_options(api_key="reader")
        assert (await reader.conversations.retrieve(talk.id)).id == talk.id
        for forbidden in (reader.conversations.create(), reader.conversations.delete(talk.id)):
            with pytest.raises(openai.PermissionDeniedError):
                await forbidden


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "", {"items": [HELLO] * 21}, "items"),
        ("POST", "", {"items": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ("POST", "", {"metadata": {"a": 1}}, "metadata.a"),
        ("POST", "/{id}", {}, "metadata"),
        ("POST", "/{id}/items", {"items": []}, "items"),
        ("GET", "/{id}/items?limit=0", None, "limit"),
        ("GET", "/{id}/items?order=up", None, "order"),
    ],
)
async def test_mistakes_are_told(
    serve: Serve, archive: Archive, method: str, path: str, body: Any, param: str
) -> None:
    async with serve(FakeService(responses=archive)) as server:
        talk = await server.client.conversations.create()
        path = "/v1/conversations" + path.format(id=talk.id)
        async with server.http.request(method, path, json=body) as reply:
            assert (reply.status, (await reply.json())["error"]["param"]) == (400, param)


async def test_compaction(serve: Serve, archive: Archive) -> None:
    async with serve(FakeService(responses=archive, tokens=1000)) as server:
        create = server.client.responses.create
        first = await create(model=MODEL, input="What is it?")
        made = await server.client.responses.compact(model=MODEL, previous_response_id=first.id)
        assert (made.object, made.usage.input_tokens) == ("response.compaction", 1000)
        assert [item.type for item in made.output] == ["message", "compaction"]
        items = [item.model_dump(exclude_none=True, warnings=False) for item in made.output]
        await create(model=MODEL, input=[*items, HELLO])  # type: ignore[list-item]
        said = [(message.role, message.text) for message in server.service.requests[-1].messages]
        assert [role for role, _ in said] == ["user", "assistant", "user"]
        assert said[0] == ("user", "What is it?")
        assert said[1][1].startswith("[Earlier answers, in short]")

        manage: Any = [{"type": "compaction", "compact_threshold": 900}]
        second = await create(model=MODEL, input="So?", previous_response_id=first.id, context_management=manage)
        assert [item.type for item in second.output] == ["compaction", "message"]
        assert [message.role for message in server.service.requests[-1].messages] == ["user", "assistant", "user"]
        third = await create(model=MODEL, input="And?", previous_response_id=second.id, stream=True)
        async for _ in third:
            pass
        texts = [message.text for message in server.service.requests[-1].messages]
        assert texts[0] == "What is it?"
        assert texts[1].startswith("[Earlier")
        assert texts[2:] == ["So?", SAID, "And?"]
        manage[0]["compact_threshold"] = 1001
        unneeded = await create(model=MODEL, input="So?", previous_response_id=first.id, context_management=manage)
        assert [item.type for item in unneeded.output] == ["message"]
        manage[0]["compact_threshold"] = 900
        stream = await create(
            model=MODEL, input="So?", previous_response_id=first.id, context_management=manage, stream=True
        )
        kinds = [event.type async for event in stream]
        assert kinds[:5] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.compaction.compacting",
            "response.output_item.done",
        ]
        forged = [{"type": "compaction", "encrypted_content": "perilune-1.AAAA"}, HELLO]
        with pytest.raises(openai.BadRequestError, match="no compaction of this server"):
            await create(model=MODEL, input=forged)  # type: ignore[arg-type]
