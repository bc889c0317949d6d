"""What every `Backend` must do. Subclass in a test module and give `ready`, a backend that answers.

class TestLocal(BackendContract):
    @pytest.fixture
    async def ready(self): ...
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import pytest

from perilune.core import (
    ChoiceFinished,
    FinishReason,
    Grammar,
    GrammarKind,
    SamplingParams,
    TextDelta,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolMode,
    Tools,
)
from perilune.service.backends.protocol import (
    Backend,
    BackendDone,
    BackendEvent,
    BackendFault,
    Call,
    ChatMessage,
    FaultKind,
)

CANCEL_S = 1.0  # generous: the machine may be busy; the 50 ms of the promise are bench.cancel's to measure


@dataclass
class Ready:
    """A backend, and whether it is idle: nothing of a call runs on."""

    backend: Backend
    idle: Callable[[], bool]


def call(text: str = "Say something.", number: int = 0, **options: object) -> Call:
    sampling = SamplingParams(**{"max_tokens": 8, **options})  # type: ignore[arg-type]
    return Call(f"req-{number}", "local", (ChatMessage("system", "Be brief."), ChatMessage("user", text)), sampling)


async def collect(backend: Backend, asked: Call) -> list[BackendEvent]:
    return [event async for event in backend.chat(asked)]


def text_of(events: list[BackendEvent], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.choice == choice)


async def idle_soon(ready: Ready) -> None:
    end_s = time.monotonic() + CANCEL_S
    while not ready.idle():
        assert time.monotonic() < end_s, "something of the call runs on"
        await asyncio.sleep(0.005)


SCHEMA = '{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"],"additionalProperties":false}'
TOOLS = Tools((Tool("look_up", "Look a number up.", SCHEMA),), ToolMode.REQUIRED, "look_up")


def arguments_of(events: list[BackendEvent]) -> dict[int, str]:
    """Calls of choice 0, by number."""
    found: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolCallDelta) and event.choice == 0:
            found[event.index] = found.get(event.index, "") + event.arguments
    return found


class BackendContract:
    @pytest.fixture
    def ready(self) -> Ready:
        raise NotImplementedError

    async def test_an_answer_is_text_then_its_end_then_one_done(self, ready: Ready) -> None:
        events = await collect(ready.backend, call())
        assert text_of(events)
        assert [type(event) for event in events[-2:]] == [ChoiceFinished, BackendDone]
        assert sum(isinstance(event, (ChoiceFinished, BackendDone)) for event in events) == 2
        done = events[-1]
        assert isinstance(done, BackendDone)
        assert done.usage.prompt_tokens > 0
        assert 0 < done.usage.completion_tokens <= 8
        await idle_soon(ready)

    async def test_the_length_asked_for_is_kept(self, ready: Ready) -> None:
        events = await collect(ready.backend, call(max_tokens=2, ignore_eos=True))
        finished = [event for event in events if isinstance(event, ChoiceFinished)]
        assert [event.reason for event in finished] == [FinishReason.LENGTH]

    async def test_greedy_answers_are_the_same_twice(self, ready: Ready) -> None:
        first = text_of(await collect(ready.backend, call(number=1)))
        assert text_of(await collect(ready.backend, call(number=2))) == first

    async def test_several_choices_each_end(self, ready: Ready) -> None:
        asked = Call("req-n", "local", (ChatMessage("user", "Hello"),), SamplingParams(0.7, max_tokens=3), n=2)
        events = await collect(ready.backend, asked)
        assert {event.choice for event in events if isinstance(event, ChoiceFinished)} == {0, 1}
        assert text_of(events, 0)
        assert text_of(events, 1)

    async def test_leaving_early_stops_the_work(self, ready: Ready) -> None:
        async with aclosing(ready.backend.chat(call(max_tokens=400, ignore_eos=True))) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    break
        await idle_soon(ready)

    async def test_a_cancelled_task_stops_the_work(self, ready: Ready) -> None:
        task = asyncio.create_task(collect(ready.backend, call(max_tokens=400, ignore_eos=True)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        await idle_soon(ready)

    async def test_many_at_once_are_kept_apart(self, ready: Ready) -> None:
        answers = await asyncio.gather(
            *(collect(ready.backend, call(f"Number {number}", number)) for number in range(6))
        )
        assert all(isinstance(events[-1], BackendDone) for events in answers)
        await idle_soon(ready)

    async def test_a_prompt_over_the_window_is_its_own_fault(self, ready: Ready) -> None:
        words = "long words " * ready.backend.window_tokens
        with pytest.raises(BackendFault) as caught:
            await collect(ready.backend, call(words))
        assert caught.value.kind is FaultKind.TOO_LONG
        await idle_soon(ready)

    async def test_it_answers_a_probe(self, ready: Ready) -> None:
        await ready.backend.probe()

    async def test_it_has_names_and_a_window(self, ready: Ready) -> None:
        assert ready.backend.name
        assert ready.backend.model_id
        assert ready.backend.window_tokens > 0


class FormsContract(BackendContract):
    """And of those that take tools and forms of answers: real servers with real models. `holds_calls`: arguments of
    calls follow their schema."""

    holds_calls = True

    async def test_a_schema_is_kept(self, ready: Ready) -> None:
        asked = call("Give me a number.", max_tokens=48, grammar=Grammar(GrammarKind.JSON_SCHEMA, SCHEMA))
        events = await collect(ready.backend, asked)
        assert isinstance(json.loads(text_of(events))["n"], int)
        await idle_soon(ready)

    async def test_a_tool_that_must_be_called_is(self, ready: Ready) -> None:
        asked = replace(call("Look up the number 7.", max_tokens=64), tools=TOOLS)
        events = await collect(ready.backend, asked)
        first = next(event for event in events if isinstance(event, ToolCallDelta))
        assert first.name == "look_up"
        assert first.call_id
        (arguments,) = [json.loads(each) for each in arguments_of(events).values()]
        assert not self.holds_calls or isinstance(arguments["n"], int)
        assert isinstance(events[-2], ChoiceFinished)
        assert events[-2].reason in (FinishReason.TOOL_CALLS, FinishReason.STOP)
        await idle_soon(ready)

    async def test_a_tools_result_is_read(self, ready: Ready) -> None:
        """The prompt with a call and its result is longer than the one without, and is answered."""
        plain = call("What is the number of the locker?", temperature=0.0)
        made = ToolCall("call_1", "look_up", '{"n": 7}')
        talk = (
            *plain.messages,
            ChatMessage("assistant", "", (made,)),
            ChatMessage("tool", "The locker has the number 4471.", (), "call_1"),
        )
        free = replace(TOOLS, mode=ToolMode.AUTO, name=None)
        events = await collect(ready.backend, replace(plain, messages=talk, tools=free))
        assert text_of(events) or arguments_of(events)
        done, without = events[-1], (await collect(ready.backend, plain))[-1]
        assert isinstance(done, BackendDone)
        assert isinstance(without, BackendDone)
        assert done.usage.prompt_tokens > without.usage.prompt_tokens
