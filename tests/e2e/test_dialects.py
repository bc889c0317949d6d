"""OpenAI's and Anthropic's unmodified clients against `perilune serve` with the real model: every dialect."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from .calls import call
from .conftest import MODEL, Server, new_home, serving
from .streams import FIRST_S, SILENCE_S, Lateness, cut_after, events_in, long_prompt, requests_of, timed

ASK: dict[str, Any] = {"model": MODEL, "input": "Name three rivers.", "temperature": 0, "max_output_tokens": 24}


def until(server: Server, response_id: str, within_s: float = 120.0) -> Any:
    """The response, once it has come to an end."""
    end = time.monotonic() + within_s
    while (found := server.client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < end, found.status
        time.sleep(0.05)
    return found


def test_responses_in_the_background(server: Server) -> None:
    create, retrieve = server.client.responses.create, server.client.responses.retrieve
    usual = create(**ASK)
    stream = create(**ASK, background=True, stream=True)
    first = next(iter(stream))
    stream.close()  # nobody waits
    response_id = first.response.id  # type: ignore[union-attr]
    made = until(server, response_id)
    assert (made.status, made.output_text) == (usual.status, usual.output_text)

    events = list(retrieve(response_id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for cut in range(0, len(events), 5):
        rest = list(retrieve(response_id, stream=True, starting_after=cut))
        assert [event.to_dict() for event in rest] == [event.to_dict() for event in events[cut + 1 :]]

    endless = create(**{**ASK, "max_output_tokens": 4000}, background=True)
    while retrieve(endless.id).status == "queued":
        time.sleep(0.02)
    assert server.client.responses.cancel(endless.id).status == "cancelled"
    server.until_idle()


def test_conversations_and_compaction(server: Server) -> None:
    create, talks = server.client.responses.create, server.client.conversations
    talk = talks.create(items=[{"type": "message", "role": "user", "content": "My dog is called Otto."}])
    first = create(**ASK, conversation=talk.id)
    second = create(**{**ASK, "input": "Which is the longest?"}, conversation=talk.id)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 20
    items = list(talks.items.list(talk.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]

    small = server.client.responses.compact(model=MODEL, previous_response_id=create(**ASK).id)
    assert [item.type for item in small.output] == ["message", "compaction"]
    sent: Any = [item.model_dump(exclude_none=True, warnings=False) for item in small.output]
    follows = create(**{**ASK, "input": [*sent, {"role": "user", "content": "And a lake?"}]})
    assert follows.output_text

    talks.delete(talk.id)
    for response_id in (first.id, second.id):
        with pytest.raises(openai.NotFoundError):
            server.client.responses.retrieve(response_id)


def test_what_is_deleted_while_an_answer_is_made_isnt_kept(server: Server) -> None:
    client = server.client
    file = client.files.create(file=("rivers.txt", b"The Oder is 840 km long. " * 20), purpose="user_data")
    content = [{"type": "input_file", "file_id": file.id}, {"type": "input_text", "text": "How long is it?"}]
    talk = client.conversations.create()
    for asked, delete in (
        ({"input": [{"role": "user", "content": content}]}, lambda: client.files.delete(file.id)),
        ({"conversation": talk.id}, lambda: client.conversations.delete(talk.id)),
    ):
        with client.responses.create(**{**ASK, **asked, "max_output_tokens": 60}, stream=True) as stream:
            kept = None
            for event in stream:
                if event.type == "response.output_text.delta" and kept is None:
                    delete()
                    kept = False
                if event.type in ("response.completed", "response.incomplete"):
                    response_id = event.response.id  # type: ignore[union-attr]
        assert kept is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)


def test_an_answer_whose_server_is_killed_is_failed(tmp_path: Path, smollm2_path: Path) -> None:
    home = new_home(tmp_path, smollm2_path)
    with serving(home) as server:
        lost = server.client.responses.create(**{**ASK, "max_output_tokens": 4000}, background=True)
        done = until(server, server.client.responses.create(**ASK, background=True).id)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with serving(home) as server:
        assert server.client.responses.retrieve(lost.id).status == "failed"
        assert server.client.responses.retrieve(done.id).output_text == done.output_text
        kinds = [event.type for event in server.client.responses.retrieve(done.id, stream=True, starting_after=3)]
        assert kinds[-1] in ("response.completed", "response.incomplete")


def test_completions(server: Server) -> None:
    create = server.client.completions.create
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "The capital of France is",
        "temperature": 0,
        "max_tokens": 8,
    }
    whole = create(**asked, logprobs=2)
    (choice,) = whole.choices
    assert "Paris" in choice.text
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs or [])
    streamed = "".join(chunk.choices[0].text for chunk in create(**asked, stream=True) if chunk.choices)
    assert streamed == choice.text
    assert create(**asked, echo=True).choices[0].text == asked["prompt"] + choice.text
    cut = create(**asked, stop=["Paris"]).choices[0]
    assert (cut.text, cut.finish_reason) == (choice.text.split("Paris")[0], "stop")

    several = create(**{**asked, "prompt": [asked["prompt"], "One, two, three,"]})
    assert several.choices[0].text == choice.text
    assert "four" in several.choices[1].text
    again = create(**{**asked, "max_tokens": 0}, echo=True)
    assert (again.choices[0].text, again.usage.completion_tokens) == (asked["prompt"], 0)  # type: ignore[union-attr]

    drawn = {**asked, "temperature": 1.5, "seed": 7}
    best = create(**drawn, best_of=4, logprobs=0).choices[0]
    all_four = create(**drawn, n=4, logprobs=0).choices

    def worth(found: Any) -> float:
        values = found.logprobs.token_logprobs
        return float(sum(values) / len(values))

    assert worth(best) == pytest.approx(max(map(worth, all_four)), abs=1e-4)
    with pytest.raises(openai.BadRequestError, match="window"):
        create(**{**asked, "prompt": [5] * 9000})
    with pytest.raises(openai.BadRequestError, match="no token"):
        create(**{**asked, "prompt": [10_000_000]})
    written = create(**{**asked, "prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "echo": True})
    assert written.usage is not None
    assert written.usage.prompt_tokens < 12  # markers are special tokens


def test_embeddings(server: Server) -> None:
    create = server.client.embeddings.create
    (model,) = [each.id for each in server.client.models.list() if each.id != MODEL]
    texts = ["A dog barks.", "Ein Hund bellt.", "Interest rates rose."]
    found = create(model=model, input=texts)  # base64: the client's own choice
    dog, hund, rates = (each.embedding for each in found.data)
    assert len(dog) == 384

    def likeness(first: list[float], second: list[float]) -> float:
        return sum(a * b for a, b in zip(first, second, strict=True))

    assert likeness(dog, dog) == pytest.approx(1.0, abs=1e-3)
    assert likeness(dog, hund) > likeness(dog, rates) + 0.02
    plain = create(model=model, input=texts[0], encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(dog, abs=2e-3)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens > 4
    assert found.usage.prompt_tokens > plain.usage.prompt_tokens
    for mistake, said in (
        ({"input": [1, 2, 3]}, "token ids"),
        ({"input": [[1, 2, 3]]}, "token ids"),
        ({"input": ""}, "empty"),
        ({"dimensions": 256}, "384"),
        ({"input": "word " * 600}, "reads 512"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            create(**{"model": model, "input": "x", **mistake})  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match=model):
        create(model="text-embedding-3-small", input="x")


def test_prewarm_fills_the_cache_and_says_nothing(server: Server) -> None:
    text = "The lighthouse keeper counted every wave that night, and wrote down its height. " * 40
    messages: Any = [{"role": "system", "content": text}, {"role": "user", "content": "How many?"}]
    chat = server.client.chat.completions.create
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    warm = chat(**asked, messages=messages, extra_body={"prompt_cache_options": {"prewarm": True}})
    assert (warm.choices[0].message.content, warm.choices[0].finish_reason) == ("", "stop")
    assert warm.usage is not None
    assert warm.usage.completion_tokens == 0
    answer = chat(**asked, messages=messages)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens > 0.9 * answer.usage.prompt_tokens
    assert answer.usage.model_extra["cached_tokens"] == answer.usage.prompt_tokens_details.cached_tokens  # type: ignore[index]

    other = text.replace("keeper", "painter")
    items: Any = [{"role": "user", "content": other}]
    first = server.client.responses.create(model=MODEL, input=items, prompt_cache_options={"prewarm": True})
    assert (first.status, first.output) == ("completed", [])
    second = server.client.responses.create(model=MODEL, input=items, max_output_tokens=4)
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0.9 * second.usage.input_tokens


def test_a_chat_cut_at_any_byte_goes_on_where_it_was_cut(server: Server) -> None:
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12, "stream": True}
    body |= {"messages": [{"role": "user", "content": "Name three rivers."}]}
    whole = "".join(map(said, cut_after(server, None, "POST", "/v1/chat/completions", body)))
    assert len(whole) > 10
    body["stream_options"] = {"resumable": True}
    cuts = random.Random(5)
    for _ in range(4):
        got = cut_after(server, cuts.randrange(300, 1500), "POST", "/v1/chat/completions", body)
        path = f"/v1/chat/completions/{got[0]['data']['id']}?starting_after="
        while got[-1]["data"] is not None:
            got += cut_after(server, cuts.randrange(1, 1500), "GET", f"{path}{got[-1]['id']}")
        assert [int(event["id"]) for event in got] == list(range(len(got)))
        assert "".join(map(said, got)) == whole


def test_a_response_cut_at_any_byte_goes_on_where_it_was_cut(server: Server) -> None:
    body = {**ASK, "max_output_tokens": 12, "stream": True, "background": True}
    whole = server.client.responses.create(**{**ASK, "max_output_tokens": 12}).output_text
    cuts = random.Random(6)
    for _ in range(4):
        got = cut_after(server, cuts.randrange(700, 6000), "POST", "/v1/responses", body)
        path = f"/v1/responses/{got[0]['data']['response']['id']}?stream=true&starting_after="
        while not got[-1]["data"]["type"].startswith(("response.completed", "response.incomplete")):
            got += cut_after(server, cuts.randrange(1, 4000), "GET", f"{path}{got[-1]['id']}")
        numbers = [event["data"]["sequence_number"] for event in got]
        assert numbers == [int(event["id"]) for event in got] == list(range(len(got)))
        deltas = (each["data"] for each in got if each["data"]["type"] == "response.output_text.delta")
        assert "".join(each["delta"] for each in deltas) == whole


def said(event: dict[str, Any]) -> str:
    """The text in a chunk of a chat."""
    choices = (event["data"] or {}).get("choices") or []
    return str(choices[0]["delta"].get("content") or "") if choices else ""


def test_no_stream_is_silent_while_a_prompt_is_computed(server: Server) -> None:
    """As promised, but for what this machine is late itself; `test_silence` holds the same for eight minutes."""
    for number, dialect in enumerate(requests_of("", 0.0)):
        with Lateness() as late:
            asked = [requests_of(long_prompt(3 * number + turn, 300), 300.0)[dialect] for turn in range(3)]
            found = [timed(server, dialect, path, body) for path, body in asked]
        first_s = sorted(each.first_s for each in found)[1]
        assert first_s < FIRST_S + late.allowed_s, (dialect, found)
        assert max(each.silence_s for each in found) < SILENCE_S + late.allowed_s, (dialect, found)
    assert "event: ping" in timed(server, *named(requests_of(long_prompt(9, 300), 300.0), "messages")).text
    progress = requests_of(long_prompt(8, 400), 300.0)["chat"][1] | {"return_progress": True}
    text = timed(server, "chat", "/v1/chat/completions", progress).text
    stages = [event["data"] for event in events_in(text.encode()) if event["data"] and "perilune" in event["data"]]
    told = [each["perilune"] for each in stages if each["perilune"].get("stage") == "prefilling"]
    done = [each["processed"] for each in told if "total" in each]
    assert len(done) > 1
    assert done == sorted(done)
    assert all(each["choices"] == [] for each in stages[:-1])


def named(requests: dict[str, tuple[str, Any]], dialect: str) -> tuple[str, str, Any]:
    return (dialect, *requests[dialect])


def test_an_answer_begins_as_it_is_told(server: Server) -> None:
    chat = server.client.chat.completions.create
    question: Any = {"role": "user", "content": "What is the capital of France?"}
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    plain = chat(**asked, messages=[question])
    begun: Any = {"role": "assistant", "content": "The capital of France is", "partial": True}
    partial = chat(**asked, messages=[question, begun])
    assert partial.choices[0].message.content.lstrip().startswith("Paris")  # type: ignore[union-attr]
    assert partial.usage.prompt_tokens - plain.usage.prompt_tokens == 5  # type: ignore[union-attr]
    named = chat(**asked, messages=[question, {**begun, "name": "Guide"}])
    assert named.usage.prompt_tokens > partial.usage.prompt_tokens  # type: ignore[union-attr]
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        turns: Any = [question, {"role": "assistant", "content": begun["content"]}]
        message = client.messages.create(model=MODEL, max_tokens=12, messages=turns, extra_body={"temperature": 0})
        assert message.content[0].text == partial.choices[0].message.content  # type: ignore[union-attr]
    for mistake in ([begun, question], [{**question, "partial": True}]):
        with pytest.raises(openai.BadRequestError, match="partial"):
            chat(**asked, messages=mistake)


def test_balance(server: Server) -> None:
    found = server.client.get("/users/me/balance", cast_to=object)
    assert found["status"] is True  # type: ignore[index]
    assert found["data"]["available_balance"] == found["data"]["cash_balance"] > 0  # type: ignore[index]


def test_messages_cites_the_characters_of_a_document(server: Server) -> None:
    text = "The mill stands by the Oder. The rent of the mill is 940 crowns a month. Rain falls often here."
    source = {"type": "text", "media_type": "text/plain", "data": text}
    document = {"type": "document", "source": source, "title": "Lease", "citations": {"enabled": True}}
    question = {"type": "text", "text": "Repeat the sentence about the rent of the mill."}
    ask: Any = {"model": MODEL, "max_tokens": 40, "messages": [{"role": "user", "content": [document, question]}]}
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=300) as client:
        (block,) = client.messages.create(**ask, extra_body={"temperature": 0}).content
        with client.messages.stream(**ask, extra_body={"temperature": 0}) as stream:
            streamed: Any = stream.get_final_message().content[0]
    assert block.citations, block.text
    for found in block.citations:
        assert (found.type, found.document_index, found.document_title) == ("char_location", 0, "Lease")
        assert text[found.start_char_index : found.end_char_index] == found.cited_text
    assert any("940 crowns" in found.cited_text for found in block.citations)
    assert (streamed.text, streamed.citations) == (block.text, block.citations)


def _doubling(levels: int) -> dict[str, Any]:
    """Written out it would be 2 ** levels forms."""
    twice = {
        f"a{at}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{at + 1}"}] * 2, "minItems": 2}
        for at in range(levels)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**twice, f"a{levels}": {"type": "null"}}}


BOMBS: dict[str, dict[str, Any]] = {
    "itself": {"$ref": "#"},
    "ring": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "doubling": _doubling(40),
    "allOf": {"allOf": [{"anyOf": [{"pattern": "(a|b)" * size}, {"maxLength": size}]} for size in range(12)]},
    "enum": {"enum": [f"value {at}" for at in range(20_000)]},
    "backtracking": {"type": "string", "pattern": "^(([a-z]+)*)*$"},
    "backreference": {"type": "string", "pattern": "^(a+)\\1$"},
    "repeats": {"type": "string", "pattern": "^((a{1,500}){1,500}){1,500}$"},
}
REFUSED = {"itself", "ring", "allOf", "enum", "backreference"}
"""The others are followed: without backtracking, and never written out."""


def formed(schema: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The form as each dialect asks for it."""
    messages = [{"role": "user", "content": "Go on."}]
    chat = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    text = {"format": {"type": "json_schema", "name": "form", "schema": schema}}
    form = {"format": {"type": "json_schema", "schema": schema}}
    return {
        "chat": ("/v1/chat/completions", {"messages": messages, "max_tokens": 1, "response_format": chat}),
        "responses": ("/v1/responses", {"input": "Go on.", "max_output_tokens": 1, "text": text}),
        "messages": ("/v1/messages", {"messages": messages, "max_tokens": 1, "output_config": form}),
    }


def spent_s(server: Server) -> float:
    """CPU seconds of the server and of what it started."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if str(server.process.pid) in (stat.parent.name, fields[1]):
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_schema_that_explodes_is_followed_or_refused_in_each_dialect(server: Server, bomb: str) -> None:
    call(server, "any", "POST", "/v1/chat/completions", {"model": MODEL, **formed({"type": "null"})["chat"][1]})
    before_bytes, before_s = server.resident_bytes(), spent_s(server)
    for dialect, (path, body) in formed(BOMBS[bomb]).items():
        reply = call(server, "any", "POST", path, {"model": MODEL, **body})
        assert reply.status == (400 if bomb in REFUSED else 200), reply.body
        if bomb in REFUSED:
            error = json.loads(reply.body)["error"]
            kind = {"type", "message"} if dialect == "messages" else {"message", "type", "param", "code"}
            assert (set(error), error["type"]) == (kind, "invalid_request_error")
    assert spent_s(server) - before_s < 3 * 3.0
    assert server.resident_bytes() - before_bytes < 200 * 1024**2


TOOL_BOMBS = ("doubling", "allOf", "enum", "backtracking", "backreference", "repeats")


def offered(schema: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The form as that of a strict tool's argument, which must be called, in each dialect."""
    messages = [{"role": "user", "content": "Go on."}]
    properties = {"form": {name: value for name, value in schema.items() if name != "$defs"}}
    form = {"type": "object", "properties": properties, "required": ["form"], "$defs": schema.get("$defs", {})}
    form["additionalProperties"] = False
    tool = {"name": "tell", "parameters": form, "strict": True}
    chat = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    response = {"tools": [{"type": "function", **tool}], "tool_choice": "required"}
    message = {
        "tools": [{"name": "tell", "input_schema": form, "strict": True}],
        "tool_choice": {"type": "any"},
    }
    return {
        "chat": ("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **chat}),
        "responses": ("/v1/responses", {"input": "Go on.", "max_output_tokens": 1, **response}),
        "messages": ("/v1/messages", {"messages": messages, "max_tokens": 1, **message}),
    }


@pytest.mark.parametrize("bomb", TOOL_BOMBS)
def test_a_tool_whose_schema_explodes_is_followed_or_refused_in_each_dialect(server: Server, bomb: str) -> None:
    before_bytes, before_s = server.resident_bytes(), spent_s(server)
    for path, body in offered(BOMBS[bomb]).values():
        for stream in (False, True):
            reply = call(server, "any", "POST", path, {"model": MODEL, **body, "stream": stream})
            assert reply.status == (400 if bomb in REFUSED else 200), reply.body
            if bomb in REFUSED:
                error = json.loads(reply.body)["error"]
                assert error["type"] == "invalid_request_error"
                assert error["message"].startswith("The schema of a tool can't be followed: ")
    assert spent_s(server) - before_s < 3 * 3.0
    assert server.resident_bytes() - before_bytes < 200 * 1024**2


PATTERNS: dict[str, tuple[dict[str, Any], str | None]] = {
    "backtracking": ({"regex": "(a+)+b"}, None),
    "repeats": ({"regex": "((a{1,500}){1,500}){1,500}"}, None),
    "a hundred thousand": ({"regex": "a{100000}"}, None),
    "alternatives": ({"regex": "|".join(f"(a{at}|b{at})*" for at in range(3_000))}, None),
    "choices": ({"choice": [f"choice {at:05}" for at in range(500)]}, None),
    "deep": ({"regex": "(" * 5_000 + "a" + ")" * 5_000}, "nested too deeply"),
    "unclosed": ({"regex": "(a|b"}, "a group of the regular expression isn't closed (character 1)"),
    "lookahead": ({"regex": "(?=a)b"}, "isn't supported (character 1)"),
    "nothing": ({"regex": r"[^\s\S]"}, "no text at all fits it"),
    "product": ({"grammar": "start: X\nX: /(.*a.{18}.*)/ & /(.*b.{17}.*)/ & ~/(.*c.{15}.*)/"}, "too much time"),
    "endless": ({"grammar": "start: x\nx: x"}, "no text at all fits it"),
    "ambiguous": ({"grammar": 'start: x\nx: "a" | x x | x x x'}, None),
    "tool token": ({"grammar": "start: <tool>"}, "it isn't in Lark's notation, or uses what isn't supported"),
    "long": ({"grammar": "start: " + '"a" ' * 20_000}, "more than 65,536"),
}


LONG = ("product",)
"""Of them takes seconds of a process of its own, as tests/runtime/test_grammar_trial.py does, too."""


@pytest.mark.parametrize(
    "bomb", [pytest.param(name, marks=pytest.mark.soak) if name in LONG else name for name in PATTERNS]
)
def test_a_pattern_that_explodes_is_followed_or_refused(server: Server, bomb: str) -> None:
    """Where only chats have such forms, streamed or not: a refusal has its status, never a stream."""
    form, refusal = PATTERNS[bomb]
    before_bytes, before_s = server.resident_bytes(), spent_s(server)
    body = {**formed({})["chat"][1], "model": MODEL, "structured_outputs": form, "max_tokens": 4}
    del body["response_format"]
    for stream in (False, True):
        reply = call(server, "any", "POST", "/v1/chat/completions", {**body, "stream": stream})
        assert reply.status == (200 if refusal is None else 400), reply.body
        if refusal is not None:
            error = json.loads(reply.body)["error"]
            assert refusal in error["message"]
            assert (error["type"], error["param"]) == (
                "invalid_request_error",
                f"structured_outputs.{next(iter(form))}",
            )
    assert spent_s(server) - before_s < 3 * 3.0
    assert server.resident_bytes() - before_bytes < 200 * 1024**2


WRONG: dict[str, tuple[dict[str, Any], int]] = {
    "model": ({"model": "none"}, 404),
    "temperature": ({"temperature": 9}, 400),
    "tokens": ({"max_tokens": 10**9}, 400),
    "schema": ({"form": {"type": "nonsense"}}, 400),
    "file": ({"files": ["file-none"]}, 404),
    "length": ({"text": "word " * 40_000, "context_policy": "full"}, 400),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_stream_that_can_not_begin_has_its_status(server: Server, wrong: str) -> None:
    """In each dialect: 4xx and its error, never a stream of one event."""
    change, status = WRONG[wrong]
    form = change.get("form", {"type": "null"})
    call(server, "any", "POST", "/v1/chat/completions", {"model": MODEL, **formed({"type": "null"})["chat"][1]})
    for dialect, (path, body) in formed(form).items():
        rest = {
            name: value for name, value in change.items() if name not in ("form", "text", "files", "max_tokens")
        }
        asked = {"model": MODEL, **body, "stream": True, **rest}
        limit, told = ("max_output_tokens", "input") if dialect == "responses" else ("max_tokens", "messages")
        if "max_tokens" in change:
            asked[limit] = change["max_tokens"]
        content: Any = change.get("text", "Go on.")
        if "files" in change:
            kind = {"responses": "input_file", "chat": "file", "messages": "document"}[dialect]
            file_id = change["files"][0]
            part = {
                "chat": {"file": {"file_id": file_id}},
                "responses": {"file_id": file_id},
                "messages": {"source": {"type": "file", "file_id": file_id}},
            }[dialect]
            text = {"type": "input_text" if dialect == "responses" else "text", "text": "Go on."}
            content = [{"type": kind, **part}, text]
        asked[told] = [{"role": "user", "content": content}]
        reply = call(server, "any", "POST", path, asked)
        assert (reply.status, reply.media) == (status, "application/json"), (dialect, reply.body[:300])
        error = json.loads(reply.body)["error"]
        assert set(error) >= {"type", "message"}
