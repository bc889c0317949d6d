"""litellm, as it comes: OpenAI's dialect by its `openai/` route, Anthropic's by `anthropic/`."""

import json
import time

import litellm
import proof
from proof import ASKED, BUSY_KEY, CITY, KEY, LONG, LONGEST, MODEL, QUESTION, RESULTS, SAID, TOKENS, URL, WEATHER

litellm.suppress_debug_info = True  # it prints on stdout
ROUTE = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "max_retries": 0, "timeout": 300}
ASK = {**ROUTE, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": WEATHER}}


def plain():
    answer = litellm.completion(**ASK)
    return {"text": answer.choices[0].message.content, "usage": answer.usage.model_dump()}


def stream():
    texts, usage = [], None
    for chunk in litellm.completion(**ASK, stream=True, stream_options={"include_usage": True}):
        texts += [choice.delta.content for choice in chunk.choices if choice.delta.content]
        usage = getattr(chunk, "usage", None) or usage
    return {"text": "".join(texts), "pieces": len(texts), "usage": usage.model_dump()}


def _called(message):
    return [json.loads(call.function.arguments) for call in message.tool_calls]


def tools():
    asked = [{"role": "user", "content": ASKED}]
    choice = {"type": "function", "function": {"name": "weather"}}
    first = litellm.completion(**ROUTE, messages=asked, tools=[TOOL], tool_choice=choice, temperature=0).choices[0]
    call = first.message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULTS[0]}
    last = litellm.completion(
        **ROUTE, messages=[*asked, first.message, result], tools=[TOOL], tool_choice="none", max_tokens=TOKENS
    )
    return {"calls": _called(first.message), "reason": first.finish_reason, "text": last.choices[0].message.content}


def parallel():
    calls = [
        {
            "id": f"call_{at}",
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"city": city})},
        }
        for at, city in enumerate(("Oslo", "Lima"))
    ]
    messages = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *[{"role": "tool", "tool_call_id": f"call_{at}", "content": text} for at, text in enumerate(RESULTS)],
        {"role": "assistant", "content": SAID},
        {"role": "user", "content": ASKED},
    ]
    ask = {**ROUTE, "messages": messages, "tools": [TOOL], "tool_choice": "required", "temperature": 0}
    whole = litellm.completion(**ask)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**ask, stream=True)))
    one = litellm.completion(**ask, parallel_tool_calls=False)
    return {
        "calls": _called(whole.choices[0].message),
        "streamed": _called(streamed.choices[0].message),
        "one": len(one.choices[0].message.tool_calls),
    }


def _form(schema):
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}


def json_schema():
    answer = litellm.completion(**ROUTE, messages=ASK["messages"], response_format=_form(CITY))
    return {"value": json.loads(answer.choices[0].message.content)}


def _stream_of(key, schema):
    ask = {**ROUTE, "api_key": key, "messages": ASK["messages"]}
    events = litellm.completion(**ask, response_format=_form(schema), stream=True)
    for chunk in events:
        if chunk.choices and chunk.choices[0].delta.content:
            return events
    raise AssertionError("the stream was empty")


def retry():
    events = _stream_of(BUSY_KEY, LONG)
    answer = litellm.completion(**{**ASK, "api_key": BUSY_KEY, "max_retries": 20})
    del events
    return {"text": answer.choices[0].message.content}


def errors():
    found = {}
    for name, more in (("model", {"model": "openai/none"}), ("value", {"temperature": 9})):
        try:
            litellm.completion(**{**ASK, **more})
        except Exception as error:  # its classes have no common base
            found[name] = [type(error).__name__]
    return {"found": found}


def anthropic():
    route = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY, "timeout": 300}
    whole = litellm.completion(**route, messages=ASK["messages"], max_tokens=TOKENS)
    chunks = litellm.completion(**route, messages=ASK["messages"], max_tokens=TOKENS, stream=True)
    streamed = litellm.stream_chunk_builder(list(chunks))
    return {"text": whole.choices[0].message.content, "streamed": streamed.choices[0].message.content}


def files():
    route = {"custom_llm_provider": "openai", "api_base": f"{URL}/v1", "api_key": KEY}
    made = litellm.create_file(file=("notes.txt", b"The rent is 940 crowns a month."), purpose="user_data", **route)
    content = litellm.file_content(file_id=made.id, **route).content.decode()
    listed = [each.id for each in litellm.file_list(**route)]
    gone = litellm.file_delete(file_id=made.id, **route).deleted
    return {"listed": made.id in listed, "content": content, "gone": gone}


def batches():
    route = {"custom_llm_provider": "openai", "api_base": f"{URL}/v1", "api_key": KEY}
    ask = {"model": MODEL, "messages": ASK["messages"], "temperature": 0}
    lines = [
        {
            "custom_id": f"l{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {**ask, "max_tokens": 2 - 4 * n},
        }
        for n in range(2)
    ]
    data = "\n".join(json.dumps(line) for line in lines).encode()
    source = litellm.create_file(file=("in.jsonl", data), purpose="batch", **route)
    made = litellm.create_batch(
        input_file_id=source.id, endpoint="/v1/chat/completions", completion_window="24h", **route
    )
    batch = made
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.2)
        batch = litellm.retrieve_batch(batch_id=made.id, **route)
    files = (batch.output_file_id, batch.error_file_id)
    read = [json.loads(litellm.file_content(file_id=each, **route).text) for each in files]
    late = False
    try:
        litellm.cancel_batch(batch_id=made.id, **route)
    except Exception as error:  # its classes have no common base
        late = "can't be cancelled" in str(error)
    counts = batch.request_counts
    return {
        "status": batch.status,
        "counts": {name: getattr(counts, name) for name in ("total", "completed", "failed")},
        "ids": [each["custom_id"] for each in read],
        "text": read[0]["response"]["body"]["choices"][0]["message"]["content"],
        "refused": read[1]["response"]["status_code"],
        "listed": made.id in [each.id for each in litellm.list_batches(**route)],
        "late": late,
    }


def cancel():
    events = _stream_of(KEY, LONGEST)
    events.completion_stream.close()
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
        "anthropic": anthropic,
        "files": files,
        "batches": batches,
        "cancel": cancel,
    }
)
