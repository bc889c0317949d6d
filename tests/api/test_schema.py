"""The request parser: every bad input gets a 400 that names the field, and no input gets anything worse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perilune.api.fields import REFUSED
from perilune.api.schema import MAX_CHOICES, ChatCall, WireChat, WireStreamOptions, parse_chat
from perilune.config import ModelSettings, ServerSettings, Settings
from perilune.core import ServiceClass
from perilune.errors import InvalidRequest
from perilune.service.ports import Caller

SETTINGS = Settings(server=ServerSettings(max_messages=8), model=ModelSettings(temperature=0.7))
UNSUPPORTED = REFUSED["chat"]
GOOD: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def parse(body: bytes | dict[str, Any], caller: Caller | None = None) -> ChatCall:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_chat(
        data,
        request_id="req_1",
        caller=caller or Caller("local", "admin"),
        arrival_s=1.0,
        settings=SETTINGS,
    )


def refused(body: bytes | dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    assert caught.value.status == 400
    return caught.value


def test_defaults() -> None:
    call = parse(GOOD)
    assert (call.stream, call.include_usage, call.include_progress) == (False, False, False)
    assert (call.request.n, call.request.deadline_s) == (1, None)
    assert call.request.sampling.temperature == 0.7  # the configuration's, where the request names none
    assert call.request.sampling.logprobs is None
    assert call.request.service_class is ServiceClass.P0_INTERACTIVE


def test_deadline_of_the_request_comes_before_the_key() -> None:
    caller = Caller("t", "user", deadline_s=9.0)
    assert parse(GOOD, caller).request.deadline_s == 9.0
    assert parse({**GOOD, "deadline_s": 2}, caller).request.deadline_s == 2
    assert parse(GOOD, caller).request.tenant == "t"


def test_null_means_absent() -> None:
    nothing = {name: None for name in WireChat.model_fields if name not in ("model", "messages")}
    assert parse({**GOOD, **nothing, **dict.fromkeys(UNSUPPORTED)}) == parse(GOOD)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 3),
        ("model", None),
        ("model", ""),
        ("messages", "hi"),
        ("messages", []),
        ("messages", {}),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", 10**12),
        ("max_tokens", 10**30),
        ("max_completion_tokens", -5),
        ("n", 0),
        ("n", MAX_CHOICES + 1),
        ("n", 10**18),
        ("seed", "x"),
        ("seed", 1.0),
        ("seed", 2**63),
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {"99999999999": 1}),
        ("logit_bias.5", {"5": 101}),
        ("logprobs", 1),
        ("top_logprobs", 3),
        ("top_logprobs", 21),
        ("stop[0]", ""),
        ("stop", 3),
        ("stop[1]", ["a", 2]),
        ("stop", ["x"] * 17),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("deadline", 0),
        ("deadline_s", 0),
        ("deadline_s", -1),
        ("deadline_s", 10**9),
        ("context_policy", "half"),
        ("service_tier", "gold"),
        ("service_tier", 7),
        *[(name, object) for name in UNSUPPORTED],
    ],
)
def test_wrong_values_name_their_field(field: str, value: Any) -> None:
    key = field.split("[")[0].split(".")[0]
    error = refused({**GOOD, key: {"x": 1} if value is object else value})
    assert error.param == field
    if key in UNSUPPORTED:
        assert error.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": "function", "content": "x", "name": "f"}, "messages[0].role"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "file"}]}, "messages[0].content[0].file.file_id"),
        (
            {"role": "user", "content": [{"type": "file", "file": {"file_data": "x"}}]},
            "messages[0].content[0].file.file_id",
        ),
        ({"role": "user", "content": [{"type": "file", "file": 3}]}, "messages[0].content[0].file"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "messages[0].content[0].file_id"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls[0].id"),
        ({"role": "user", "content": "x", "partial": True}, "messages[0].partial"),
    ],
)
def test_wrong_messages_name_their_place(message: Any, param: str) -> None:
    assert refused({**GOOD, "messages": [message]}).param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b"[" * 1000 + b"]" * 1000,
        b'{"a":' * 1000 + b"1" + b"}" * 1000,
        b'{"a":' * 100_000,
        b"1" * 100_000,
    ],
)
def test_what_is_not_a_json_object(body: bytes) -> None:
    refused(body)


def test_bounds() -> None:
    assert refused({**GOOD, "messages": GOOD["messages"] * 9}).param == "messages"
    files = [{"type": "input_file", "file_id": f"f{i}"} for i in range(65)]
    assert refused({**GOOD, "messages": [{"role": "user", "content": files}]}).param == "messages"
    assert refused({**GOOD, "metadata": json.loads("[" * 70 + "]" * 70)})


def test_disagreeing_spellings() -> None:
    assert refused({**GOOD, "max_tokens": 3, "max_completion_tokens": 4}).param == "max_tokens"
    assert refused({**GOOD, "deadline": 3, "deadline_s": 4}).param == "deadline"
    assert parse({**GOOD, "max_tokens": 3, "max_completion_tokens": 3}).request.sampling.max_tokens == 3


def test_errors_do_not_repeat_the_prompt() -> None:
    secret = "my diary " * 20
    error = refused({**GOOD, "messages": [{"role": "user", "content": [{"type": secret, "text": secret}]}]})
    assert "diary" not in str(error)


def test_neutral_spellings() -> None:
    body = {
        **GOOD,
        "stop": "x",
        "top_k": -1,
        "top_p": 0,
        "tools": [],
        "response_format": {"type": "text"},
        "unknown": 1,
    }
    sampling = parse(body).request.sampling
    assert sampling.stop == ("x",)
    assert sampling.top_k == 0
    assert 0 < sampling.top_p < 1e-3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from([*WireChat.model_fields, *UNSUPPORTED, "user"])
PART = st.dictionaries(
    st.sampled_from(["type", "text", "file", "file_id"]), JSON | st.sampled_from(["text", "file"])
)
MESSAGE = st.dictionaries(
    st.sampled_from(["role", "content", "name", "tool_calls"]),
    JSON | st.sampled_from(["user", "assistant", "tool"]) | st.lists(PART, max_size=3),
)
BODY = st.dictionaries(FIELDS, JSON | st.lists(MESSAGE, max_size=3), max_size=6)


@given(st.one_of(BODY, BODY.map(lambda body: {**GOOD, **body}), JSON))
@example({**GOOD, "logit_bias": {"1": True}})
def test_no_json_breaks_the_parser(body: Any) -> None:
    _survives(json.dumps(body, allow_nan=True).encode("utf-8", "surrogatepass"))


@given(st.binary(max_size=200))
def test_no_bytes_break_the_parser(body: bytes) -> None:
    _survives(body)


@given(st.binary(min_size=1, max_size=4), st.integers(min_value=0, max_value=200))
def test_no_damage_breaks_the_parser(damage: bytes, at: int) -> None:
    good = orjson.dumps({**GOOD, "stop": ["a"], "logit_bias": {"1": 2}, "stream": True, "stream_options": {}})
    _survives(good[:at] + damage + good[at + len(damage) :])


def _survives(body: bytes) -> None:
    try:
        assert parse(body).request.messages
    except InvalidRequest as error:
        message = str(error)
    else:
        message = "accepted"
    assert message


def test_every_field_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    names = [*WireChat.model_fields, *WireStreamOptions.model_fields, *UNSUPPORTED]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_a_deadline_of_an_hour_is_one() -> None:
    assert parse({**GOOD, "deadline_s": 3600}).request.deadline_s == 3600
    assert refused({**GOOD, "deadline_s": 86_401}).param == "deadline_s"


@pytest.mark.parametrize(("size", "results"), [("low", 3), ("medium", 5), ("high", 10)])
def test_a_web_search_has_a_size(size: str, results: int) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert parse(asked).request.web_results == 0
    assert parse(asked | {"web_search_options": {}}).request.web_results == 5
    assert parse(asked | {"web_search_options": {"search_context_size": size}}).request.web_results == results
    with pytest.raises(InvalidRequest, match="web_search_options"):
        parse(asked | {"web_search_options": {"search_context_size": "all"}})
