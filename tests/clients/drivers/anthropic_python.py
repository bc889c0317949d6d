"""The anthropic package for Python, as it comes."""

import json

import anthropic
import proof
from proof import ASKED, BUSY_KEY, CITY, KEY, LONG, LONGEST, MODEL, QUESTION, RESULTS, SAID, TOKENS, URL, WEATHER

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=300)
ASK = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS}
TOOL = {"name": "weather", "description": "Weather.", "input_schema": WEATHER}


def _usage(usage):
    return {
        "prompt_tokens": usage.input_tokens + (usage.cache_read_input_tokens or 0),
        "completion_tokens": usage.output_tokens,
    }


def plain():
    answer = client.messages.create(**ASK)
    return {"text": answer.content[0].text, "usage": _usage(answer.usage), "id": answer._request_id}


def stream():
    with client.messages.stream(**ASK) as events:
        texts = list(events.text_stream)
        last = events.get_final_message()
    return {"text": "".join(texts), "pieces": len(texts), "usage": _usage(last.usage)}


def _called(message):
    return [block.input for block in message.content if block.type == "tool_use"]


def tools():
    ask = {"model": MODEL, "max_tokens": 200, "tools": [TOOL]}
    asked = [{"role": "user", "content": ASKED}]
    first = client.messages.create(**ask, messages=asked, tool_choice={"type": "tool", "name": "weather"})
    call = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULTS[0]}
    messages = [*asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(**{**ask, "max_tokens": TOKENS}, messages=messages, tool_choice={"type": "none"})
    return {"calls": _called(first), "reason": first.stop_reason, "text": last.content[0].text}


def parallel():
    cities = ("Oslo", "Lima")
    calls = [
        {"type": "tool_use", "id": f"call_{at}", "name": "weather", "input": {"city": city}}
        for at, city in enumerate(cities)
    ]
    results = [
        {"type": "tool_result", "tool_use_id": f"call_{at}", "content": text} for at, text in enumerate(RESULTS)
    ]
    messages = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": results},
        {"role": "assistant", "content": SAID},
        {"role": "user", "content": ASKED},
    ]
    ask = {"model": MODEL, "messages": messages, "max_tokens": 200, "tools": [TOOL]}
    whole = client.messages.create(**ask, tool_choice={"type": "any"})
    with client.messages.stream(**ask, tool_choice={"type": "any"}) as events:
        streamed = events.get_final_message()
    one = client.messages.create(**ask, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    return {"calls": _called(whole), "streamed": _called(streamed), "one": len(_called(one))}


def json_schema():
    form = {"format": {"type": "json_schema", "schema": CITY}}
    answer = client.messages.create(**{**ASK, "max_tokens": 200}, output_config=form)
    return {"value": json.loads(answer.content[0].text)}


def _stream_of(by, schema):
    """A stream whose answer has begun, and whose form makes it long."""
    form = {"format": {"type": "json_schema", "schema": schema}}
    events = by.messages.create(**{**ASK, "max_tokens": 6000}, output_config=form, stream=True)
    while next(events).type != "content_block_delta":
        pass
    return events


def retry():
    busy = anthropic.Anthropic(base_url=URL, api_key=BUSY_KEY, max_retries=20, timeout=300)
    events = _stream_of(busy, LONG)
    answer = busy.messages.create(**ASK)
    events.close()
    return {"text": answer.content[0].text}


def errors():
    found = {}
    for name, more in (("model", {"model": "none"}), ("value", {"max_tokens": 0})):
        try:
            client.messages.create(**{**ASK, **more})
        except anthropic.APIStatusError as error:
            found[name] = [type(error).__name__, error.body["error"]["type"], error.request_id is not None]
    return {"found": found}


def count():
    return {"tokens": client.messages.count_tokens(model=MODEL, messages=ASK["messages"]).input_tokens}


def cancel():
    _stream_of(client, LONGEST).close()
    return {}


proof.run(
    {
        "plain": plain,
        "stream": stream,
        "tools": tools,
        "parallel": parallel,
        "json_schema": json_schema,
        "retry": retry,
        "errors": errors,
        "count": count,
        "cancel": cancel,
    }
)
