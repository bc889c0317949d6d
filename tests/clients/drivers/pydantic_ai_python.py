"""pydantic-ai's agents, as they come: over Chat Completions, Responses and Messages."""

import asyncio
from typing import Literal

import proof
from openai import AsyncOpenAI
from proof import ASKED, BUSY_KEY, KEY, LONG, LONGEST, MODEL, QUESTION, RESULTS, SAID, TOKENS, URL, WEATHER
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, StructuredDict, ToolOutput
from pydantic_ai.direct import model_request, model_request_stream
from pydantic_ai.messages import (
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Lima"]
    people: Literal[1, 2, 3]


SHORT = {"max_tokens": TOKENS, "temperature": 0}
LONGER = {"max_tokens": 200, "temperature": 0}
OFFERED = ModelRequestParameters(
    function_tools=[
        ToolDefinition(name=name, description="Weather.", parameters_json_schema=WEATHER)
        for name in ("weather", "forecast", "news")
    ],
    allow_text_output=True,
)


def provider(key=KEY, retries=0):
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=retries, timeout=300)
    return OpenAIProvider(openai_client=client)


def model(key=KEY, retries=0):
    return OpenAIChatModel(MODEL, provider=provider(key, retries))


def ask(messages, tool_choice, **settings):
    """One request, below the agent's own loop, which a small model wouldn't end."""
    return model_request(
        model(),
        messages,
        model_settings={**LONGER, **settings, "tool_choice": tool_choice},
        model_request_parameters=OFFERED,
    )


def _usage(usage):
    return {"prompt_tokens": usage.input_tokens, "completion_tokens": usage.output_tokens}


def _called(message):
    return [part.args_as_dict() for part in message.parts if isinstance(part, ToolCallPart)]


async def plain():
    done = await Agent(model()).run(QUESTION, model_settings=SHORT)
    return {"text": done.output, "usage": _usage(done.usage)}


async def stream():
    async with Agent(model()).run_stream(QUESTION, model_settings=SHORT) as events:
        texts = [text async for text in events.stream_text(delta=True, debounce_by=None)]
        return {"text": "".join(texts), "pieces": len(texts), "usage": _usage(events.usage)}


async def tools():
    """One of several tools by name, and then one of a list of them (`allowed_tools`)."""
    asked = ModelRequest(parts=[UserPromptPart(ASKED)])
    first = await ask([asked], ["weather"])
    some = await ask([asked], ["weather", "forecast"])
    call = next(part for part in first.parts if isinstance(part, ToolCallPart))
    result = ToolReturnPart(tool_name="weather", content=RESULTS[0], tool_call_id=call.tool_call_id)
    last = await ask([asked, first, ModelRequest(parts=[result])], "none", max_tokens=TOKENS)
    return {
        "calls": [*_called(first), *_called(some)],
        "reason": first.provider_details["finish_reason"],
        "text": next(part.content for part in last.parts if isinstance(part, TextPart)),
    }


async def parallel():
    cities = ("Oslo", "Lima")
    calls = [ToolCallPart("weather", {"city": city}, f"call_{at}") for at, city in enumerate(cities)]
    results = [
        ToolReturnPart(tool_name="weather", content=text, tool_call_id=f"call_{at}")
        for at, text in enumerate(RESULTS)
    ]
    messages = [
        ModelRequest(parts=[UserPromptPart(ASKED)]),
        ModelResponse(parts=calls),
        ModelRequest(parts=results),
        ModelResponse(parts=[TextPart(SAID)]),
        ModelRequest(parts=[UserPromptPart(ASKED)]),
    ]
    settings = {**LONGER, "tool_choice": "required"}
    asked = {"model_settings": settings, "model_request_parameters": OFFERED}
    async with model_request_stream(model(), messages, **asked) as events:
        async for _ in events:
            pass
        streamed = _called(events.get())
    one = await ask(messages, "required", parallel_tool_calls=False)
    return {"calls": _called(await ask(messages, "required")), "streamed": streamed, "one": len(_called(one))}


async def json_schema():
    """By a form of the answer, and by a function that must be called."""
    native = await Agent(model(), output_type=NativeOutput(City)).run(QUESTION, model_settings=LONGER)
    called = await Agent(model(), output_type=ToolOutput(City)).run(QUESTION, model_settings=LONGER)
    return {"value": native.output.model_dump(), "called": called.output.model_dump()}


def _long(key, schema):
    output = NativeOutput(StructuredDict(schema, name="form"))
    return Agent(model(key), output_type=output).run_stream(QUESTION, model_settings={"max_tokens": 6000})


async def retry():
    async with _long(BUSY_KEY, LONG):
        done = await Agent(model(BUSY_KEY, 20)).run(QUESTION, model_settings=SHORT)
    return {"text": done.output}


async def responses():
    by = OpenAIResponsesModel(MODEL, provider=provider())
    first = await Agent(by).run(QUESTION, model_settings=SHORT)
    second = await Agent(by).run("And the moon?", message_history=first.all_messages(), model_settings=SHORT)
    native = await Agent(by, output_type=NativeOutput(City)).run(QUESTION, model_settings=LONGER)
    return {"text": first.output, "second": second.output, "value": native.output.model_dump()}


async def anthropic():
    by = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
    done = await Agent(by).run(QUESTION, model_settings={"max_tokens": TOKENS})
    called = await Agent(by, output_type=ToolOutput(City)).run(QUESTION, model_settings={"max_tokens": 200})
    return {"text": done.output, "called": called.output.model_dump()}


async def cancel():
    async with _long(KEY, LONGEST) as events:
        async for _ in events.stream_response(debounce_by=None):
            break
        await events.cancel()
    return {}


PROOFS = (plain, stream, tools, parallel, json_schema, retry, responses, anthropic, cancel)
LOOP = asyncio.new_event_loop()


def _proof(prove):
    return lambda: LOOP.run_until_complete(prove())


proof.run({prove.__name__: _proof(prove) for prove in PROOFS})
