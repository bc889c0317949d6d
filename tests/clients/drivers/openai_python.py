"""The openai package for Python, as it comes."""

import json
import time

import openai
import proof
from proof import ASKED, BUSY_KEY, CITY, KEY, LONG, LONGEST, MODEL, QUESTION, RESULTS, SAID, TOKENS, URL, WEATHER

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
ASK = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": WEATHER}}


def plain():
    answer = client.chat.completions.create(**ASK)
    return {"text": answer.choices[0].message.content, "usage": answer.usage.model_dump(), "id": answer._request_id}


def stream():
    texts, usage = [], None
    for chunk in client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}):
        texts += [choice.delta.content for choice in chunk.choices if choice.delta.content]
        usage = chunk.usage or usage
    return {"text": "".join(texts), "pieces": len(texts), "usage": usage.model_dump()}


def _called(message):
    return [json.loads(call.function.arguments) for call in message.tool_calls]


def tools():
    asked = [{"role": "user", "content": ASKED}]
    choice = {"type": "function", "function": {"name": "weather"}}
    first = client.chat.completions.create(
        model=MODEL, messages=asked, tools=[TOOL], tool_choice=choice, temperature=0
    ).choices[0]
    call = first.message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULTS[0]}
    last = client.chat.completions.create(
        model=MODEL, messages=[*asked, first.message, result], tools=[TOOL], tool_choice="none", max_tokens=TOKENS
    )
    return {
        "calls": _called(first.message),
        "reason": first.finish_reason,
        "text": last.choices[0].message.content,
    }


def parallel():
    """Two earlier calls in one answer are the pattern that the model follows."""
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
    ask = {"model": MODEL, "messages": messages, "tools": [TOOL], "tool_choice": "required", "temperature": 0}
    whole = client.chat.completions.create(**ask, parallel_tool_calls=True)
    with client.chat.completions.stream(**ask) as events:
        streamed = events.get_final_completion()
    one = client.chat.completions.create(**ask, parallel_tool_calls=False)
    return {
        "calls": _called(whole.choices[0].message),
        "streamed": _called(streamed.choices[0].message),
        "one": len(one.choices[0].message.tool_calls),
    }


def json_schema():
    answer = client.chat.completions.create(model=MODEL, messages=ASK["messages"], response_format=_form(CITY))
    return {"value": json.loads(answer.choices[0].message.content)}


def _form(schema):
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}


def _stream_of(by, schema):
    """A stream whose answer has begun, and whose form makes it long."""
    events = by.chat.completions.create(
        model=MODEL, messages=ASK["messages"], response_format=_form(schema), stream=True
    )
    for chunk in events:
        if chunk.choices and chunk.choices[0].delta.content:
            return events
    raise AssertionError("the stream was empty")


def retry():
    busy = openai.OpenAI(base_url=f"{URL}/v1", api_key=BUSY_KEY, max_retries=20, timeout=300)
    events = _stream_of(busy, LONG)
    answer = busy.chat.completions.create(**ASK)
    events.close()
    return {"text": answer.choices[0].message.content}


def errors():
    found = {}
    for name, more in (("model", {"model": "none"}), ("value", {"temperature": 9}), ("n", {"n": 999})):
        try:
            client.chat.completions.create(**{**ASK, **more})
        except openai.APIStatusError as error:
            found[name] = [type(error).__name__, error.code, error.param]
    return {"found": found}


def responses():
    first = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=TOKENS, temperature=0)
    with client.responses.stream(
        model=MODEL, input="And the moon?", previous_response_id=first.id, max_output_tokens=TOKENS
    ) as events:
        kinds = [event.type for event in events]
        last = events.get_final_response()
    kept = client.responses.retrieve(last.id)
    client.responses.delete(last.id)
    return {"text": first.output_text, "kinds": sorted(set(kinds)), "same": kept.output_text == last.output_text}


def files():
    made = client.files.create(file=("notes.txt", b"The rent is 940 crowns a month."), purpose="user_data")
    done = client.files.wait_for_processing(made.id, max_wait_seconds=120)
    listed = [each.id for each in client.files.list()]
    content = client.files.content(made.id).read().decode()
    gone = client.files.delete(made.id).deleted
    return {"status": done.status, "listed": made.id in listed, "content": content, "gone": gone}


def batches():
    lines = [
        {
            "custom_id": f"l{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {**ASK, "max_tokens": 2 - 4 * n},
        }
        for n in range(2)
    ]
    data = "\n".join(json.dumps(line) for line in lines).encode()
    source = client.files.create(file=("in.jsonl", data), purpose="batch")
    made = client.batches.create(
        input_file_id=source.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"job": "a"}
    )
    batch = made
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.2)
        batch = client.batches.retrieve(made.id)
    read = [json.loads(client.files.content(each).text) for each in (batch.output_file_id, batch.error_file_id)]
    try:
        client.batches.cancel(made.id)
    except openai.ConflictError:
        late = True
    return {
        "status": batch.status,
        "counts": batch.request_counts.model_dump(),
        "ids": [each["custom_id"] for each in read],
        "text": read[0]["response"]["body"]["choices"][0]["message"]["content"],
        "refused": read[1]["response"]["status_code"],
        "listed": made.id in [each.id for each in client.batches.list()],
        "late": late,
    }


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
        "responses": responses,
        "files": files,
        "batches": batches,
        "cancel": cancel,
    }
)
