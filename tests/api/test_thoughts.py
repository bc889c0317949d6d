"""What a model thinks, in every dialect's own place, read by unmodified clients over a scripted service."""

from __future__ import annotations

from typing import Any

import anthropic

from perilune.core import ChoiceFinished, Completed, FinishReason, ReasoningDelta, TextDelta, Usage

from .conftest import Serve
from .fakes import MODEL, FakeService, Step, report

SCRIPT: list[Step] = [
    ReasoningDelta(0, "Let me "),
    ReasoningDelta(0, "see."),
    TextDelta(0, "Yes."),
    ChoiceFinished(0, FinishReason.STOP),
    Completed(Usage(5, 4, 0, reasoning_tokens=2), report()),
]
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Is it?"}]}


async def test_chat_in_both_spellings(serve: Serve) -> None:
    async with serve(FakeService(script=SCRIPT)) as server:
        create = server.client.chat.completions.create
        whole = await create(**ASK)
        message = whole.choices[0].message
        assert message.content == "Yes."
        assert message.model_extra == {"reasoning_content": "Let me see.", "reasoning": "Let me see."}
        assert whole.usage is not None
        assert whole.usage.completion_tokens_details is not None
        assert whole.usage.completion_tokens_details.reasoning_tokens == 2
        thought = {"reasoning_content": "", "reasoning": ""}
        order = []
        async for chunk in await create(**ASK, stream=True):
            for choice in chunk.choices:
                for name in thought:
                    thought[name] += (choice.delta.model_extra or {}).get(name) or ""
                order += ["thought"] if choice.delta.model_extra else ["text"] if choice.delta.content else []
        assert set(thought.values()) == {"Let me see."}
        assert order == ["thought", "thought", "text"]
        for spelling in ("reasoning_content", "reasoning"):  # accepted, and not said again
            earlier = {"role": "assistant", "content": "Yes.", spelling: "Hm."}
            await create(model=MODEL, messages=[*ASK["messages"], earlier, *ASK["messages"]])
            assert [each.text for each in server.service.requests[-1].messages] == ["Is it?", "Yes.", "Is it?"]
        for field, effort in (
            ({"reasoning_effort": "low"}, "low"),
            ({"thinking": {"type": "disabled"}}, "none"),
            ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "medium"),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "none"),
            ({}, None),
        ):
            await create(**ASK, extra_body=field)
            assert server.service.requests[-1].effort == effort
        async with server.http.post(
            "/v1/chat/completions", json={**ASK, "chat_template_kwargs": {"shout": True}}
        ) as reply:
            assert reply.status == 400


async def test_responses_items_and_events(serve: Serve) -> None:
    async with serve(FakeService(script=SCRIPT)) as server:
        create = server.client.responses.create
        whole = await create(model=MODEL, input="Is it?", reasoning={"effort": "high"})
        assert server.service.requests[-1].effort == "high"
        thought, message = whole.output
        assert thought.type == "reasoning"
        assert thought.content is not None
        assert thought.content[0].text == "Let me see."
        assert message.type == "message"
        assert whole.output_text == "Yes."
        assert whole.usage is not None
        assert whole.usage.output_tokens_details.reasoning_tokens == 2
        events = [event async for event in await create(model=MODEL, input="Is it?", stream=True)]
        assert [event.type.removeprefix("response.") for event in events] == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        assert [getattr(event, "output_index", None) for event in events[2:-1]] == [0] * 7 + [1] * 6
        again = [item.model_dump(exclude_none=True) for item in whole.output]
        await create(model=MODEL, input=[*again, {"role": "user", "content": "So?"}])  # type: ignore[list-item]
        assert [each.text for each in server.service.requests[-1].messages] == ["Yes.", "So?"]


async def test_messages_blocks(serve: Serve) -> None:
    async with serve(FakeService(script=SCRIPT)) as server:
        client = anthropic.AsyncAnthropic(
            base_url=f"http://{server.host}:{server.port}", api_key="any", max_retries=0
        )
        async with client:
            thinking: Any = {"type": "enabled", "budget_tokens": 1024}
            whole = await client.messages.create(**ASK, max_tokens=50, thinking=thinking)
            thought, text = whole.content
            assert thought.type == "thinking"
            assert thought.thinking == "Let me see."
            assert text.type == "text"
            async with client.messages.stream(**ASK, max_tokens=50, thinking=thinking) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_message()
            assert final.content[0].to_dict() == thought.to_dict()
            assert kinds.count("thinking") == 2
            assert server.service.requests[-1].effort == "medium"
