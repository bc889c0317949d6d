"""langchain-openai's ChatOpenAI, as it comes: Chat Completions, and Responses in the proof of that name."""

import proof
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from proof import ASKED, BUSY_KEY, CITY, KEY, LONG, LONGEST, MODEL, QUESTION, RESULTS, SAID, TOKENS, URL, WEATHER


def chat(key=KEY, **more):
    usual = {"max_retries": 0, "max_tokens": 200, "temperature": 0, "timeout": 300, "stream_usage": True}
    return ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=key, **{**usual, **more})


TOOL = {"name": "weather", "description": "Weather.", "parameters": WEATHER}


def _usage(message):
    usage = message.usage_metadata
    return {"prompt_tokens": usage["input_tokens"], "completion_tokens": usage["output_tokens"]}


def plain():
    answer = chat(max_tokens=TOKENS).invoke(QUESTION)
    return {"text": answer.content, "usage": _usage(answer)}


def stream():
    texts, whole = [], None
    for piece in chat(max_tokens=TOKENS).stream(QUESTION):
        texts += [piece.content] if piece.content else []
        whole = piece if whole is None else whole + piece
    return {"text": "".join(texts), "pieces": len(texts), "usage": _usage(whole)}


def _called(message):
    return [call["args"] for call in message.tool_calls]


def tools():
    first = chat().bind_tools([TOOL], tool_choice="weather").invoke(ASKED)
    result = ToolMessage(RESULTS[0], tool_call_id=first.tool_calls[0]["id"])
    last = (
        chat(max_tokens=TOKENS).bind_tools([TOOL], tool_choice="none").invoke([HumanMessage(ASKED), first, result])
    )
    reason = first.response_metadata["finish_reason"]
    return {"calls": _called(first), "reason": reason, "text": last.content}


def parallel():
    calls = [
        {"id": f"call_{at}", "name": "weather", "args": {"city": city}} for at, city in enumerate(("Oslo", "Lima"))
    ]
    messages = [
        HumanMessage(ASKED),
        AIMessage("", tool_calls=calls),
        *[ToolMessage(text, tool_call_id=f"call_{at}") for at, text in enumerate(RESULTS)],
        AIMessage(SAID),
        HumanMessage(ASKED),
    ]
    model = chat().bind_tools([TOOL], tool_choice="required")
    streamed = None
    for piece in model.stream(messages):
        streamed = piece if streamed is None else streamed + piece
    one = chat().bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False).invoke(messages)
    return {"calls": _called(model.invoke(messages)), "streamed": _called(streamed), "one": len(one.tool_calls)}


def _form(schema):
    return {**schema, "title": "form", "description": "A form."}


def json_schema():
    """By OpenAI's two ways: a form of the answer, and a function that must be called."""
    value = chat().with_structured_output(_form(CITY), method="json_schema", strict=True).invoke(QUESTION)
    called = chat().with_structured_output(_form(CITY), method="function_calling").invoke(QUESTION)
    return {"value": value, "called": called}


def _stream_of(key, schema):
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}
    events = chat(key, max_tokens=6000).bind(response_format=form).stream(QUESTION)
    for piece in events:
        if piece.content:
            return events
    raise AssertionError("the stream was empty")


def retry():
    events = _stream_of(BUSY_KEY, LONG)
    answer = chat(BUSY_KEY, max_retries=20, max_tokens=TOKENS).invoke(QUESTION)
    events.close()
    return {"text": answer.content}


def responses():
    model = chat(use_responses_api=True, max_tokens=TOKENS, use_previous_response_id=True)
    first = model.invoke(QUESTION)
    whole = None
    for piece in model.stream([HumanMessage(QUESTION), first, HumanMessage("And the moon?")]):
        whole = piece if whole is None else whole + piece
    return {"text": first.text, "streamed": whole.text, "usage": _usage(whole)}


def cancel():
    _stream_of(KEY, LONGEST).close()
    return {}


proof.run(
    {
        "plain": plain,
        "stream": stream,
        "tools": tools,
        "parallel": parallel,
        "json_schema": json_schema,
        "retry": retry,
        "responses": responses,
        "cancel": cancel,
    }
)
