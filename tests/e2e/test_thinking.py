"""A model that thinks aloud, from its own file to every dialect: the real default model with a template of the kind
of Qwen3 and DeepSeek-R1 in its GGUF, which begins every answer with `<think>`. Nothing is scripted: the template's
examples make this small model think in one line and close its thoughts. What it says is its own affair: every form
is held to what the first one had."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import pytest

from .conftest import Server, serving

EXAMPLES = "".join(
    f"<|im_start|>user\nIs {noun} {word}?<|im_end|>\n"
    f"<|im_start|>assistant\n<think>\nI am asked whether {noun} is {word}.\n</think>\n\n"
    f"Yes, {noun} is {word}.<|im_end|>\n"
    for noun, word in (("snow", "white"), ("grass", "green"), ("blood", "red"), ("coal", "black"))
)
TEMPLATE = (
    "{{ '" + EXAMPLES.replace("\n", "\\n") + "' }}"
    "{% for message in messages %}{% set content = message.content.split('</think>')[-1] %}"
    "{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
MODEL = "smollm2-thinks"
ALIGNMENT = 32
"""Of a GGUF file's tensors: a header that grows by a multiple of it leaves them where they are."""


def with_template(model: Path, template: str, target: Path) -> None:
    """A copy of a GGUF file whose chat template is another, padded with a comment."""
    data = model.read_bytes()
    key = b"tokenizer.chat_template"
    at = data.index(key) + len(key) + 4  # a type stands between
    (old,) = struct.unpack_from("<Q", data, at)
    text = template.encode() + b"{##}"
    text = text[:-2] + b" " * ((old - len(text)) % ALIGNMENT) + text[-2:]
    target.write_bytes(data[:at] + struct.pack("<Q", len(text)) + text + data[at + 8 + old :])


pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    model = home / f"{MODEL}.gguf"
    with_template(smollm2_path, TEMPLATE, model)
    with serving(home, PERILUNE_MODEL__PATH=str(model)) as running:
        yield running


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=300) as client:
        yield client


QUESTION = "Is snow white?"  # as in the examples: no close call between two answers
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60}


@dataclass(frozen=True)
class Said:
    """What the model thinks and says when it is asked. `cut_tokens` end an answer while it thinks."""

    thought: str
    text: str
    cut_tokens: int


@pytest.fixture(scope="module")
def said(server: Server) -> Said:
    create = server.client.chat.completions.create
    create(**ASK)  # from here on all answers find the same prefix computed
    whole = create(**ASK)
    message, usage = whole.choices[0].message, whole.usage
    thought = (message.model_extra or {})["reasoning"]
    assert whole.choices[0].finish_reason == "stop"
    assert message.content
    for each in (thought, message.content):
        assert each == each.strip() != ""
        assert "think>" not in each
    assert thought not in message.content
    assert usage is not None
    assert usage.completion_tokens_details is not None
    tokens = usage.completion_tokens_details.reasoning_tokens or 0
    assert 4 < tokens < usage.completion_tokens
    return Said(thought, message.content, tokens // 2)


def test_chat_thinks_in_both_spellings(server: Server, said: Said) -> None:
    create = server.client.chat.completions.create
    whole = create(**ASK)
    message = whole.choices[0].message
    assert message.content == said.text
    assert message.model_extra == {"reasoning": said.thought, "reasoning_content": said.thought}
    assert whole.choices[0].finish_reason == "stop"
    told: dict[str, list[str]] = {"reasoning": [], "reasoning_content": [], "content": []}
    order: list[str] = []
    for chunk in create(**ASK, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            pieces = {name: piece for name in told if (piece := getattr(choice.delta, name, None))}
            for name, piece in pieces.items():
                told[name].append(piece)
            order += ["thought" if "reasoning" in pieces else "text"] if pieces else []
        usage = chunk.usage
    assert {name: "".join(each) for name, each in told.items()} == {
        "reasoning": said.thought,
        "reasoning_content": said.thought,
        "content": said.text,
    }
    assert len(told["reasoning"]) > 1  # as they come, not at the end
    assert order == sorted(order, key=["thought", "text"].index)
    for each in (whole.usage, usage):
        assert each is not None
        assert each.completion_tokens_details is not None
        assert 4 < (each.completion_tokens_details.reasoning_tokens or 0) < each.completion_tokens
    # Both spellings come back with the next question, and none of the thoughts is read again.
    earlier = {"role": "assistant", **message.model_dump(include={"content", "reasoning", "reasoning_content"})}
    turns = [*ASK["messages"], earlier, {"role": "user", "content": "Is milk white?"}]
    bare = [*ASK["messages"], {"role": "assistant", "content": said.text}, turns[-1]]
    read = [create(**{**ASK, "messages": each, "max_tokens": 1}).usage for each in (turns, bare)]
    assert read[0].prompt_tokens == read[1].prompt_tokens > whole.usage.prompt_tokens


def test_who_asks_for_no_thoughts_or_for_a_form_gets_none(server: Server) -> None:
    create = server.client.chat.completions.create
    plain = create(**{**ASK, "max_tokens": 12}, reasoning_effort="none").choices[0].message
    assert plain.content
    assert ("think" in plain.content, plain.model_extra) == (False, {})
    chosen = create(**ASK, extra_body={"structured_outputs": {"choice": ["sweet", "sour"]}}).choices[0].message
    assert (chosen.content in ("sweet", "sour"), chosen.model_extra) == (True, {})
    marked = {"structured_outputs": {"regex": "<think>[a-z ]{4,20}[.]</think>\n(yes|no)"}}
    asked = create(**ASK, extra_body=marked).choices[0].message
    assert asked.content in ("yes", "no")
    assert re.fullmatch("[a-z ]{3,20}[.]", (asked.model_extra or {})["reasoning"])


def test_messages_has_blocks_of_thinking_with_a_signature(claude: anthropic.Anthropic, said: Said) -> None:
    whole = claude.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 1024})
    thinking, text = whole.content
    assert thinking.to_dict() == {"type": "thinking", "thinking": said.thought, "signature": thinking.signature}
    assert thinking.signature
    assert (text.text, whole.stop_reason) == (said.text, "end_turn")
    kinds: list[str] = []
    for event in claude.messages.create(**ASK, stream=True):
        delta = event.delta.type if event.type == "content_block_delta" else event.type
        kinds += [delta] if [delta] != kinds[-1:] and delta != "ping" else []
    begin, end = "content_block_start", "content_block_stop"
    blocks = [begin, "thinking_delta", "signature_delta", end, begin, "text_delta", end]
    assert kinds == ["message_start", *blocks, "message_delta", "message_stop"]
    with claude.messages.stream(**ASK) as stream:
        streamed = stream.get_final_message().content
    assert [streamed[0], streamed[1].text] == [thinking, said.text]  # type: ignore[union-attr]
    turns: Any = [*ASK["messages"], {"role": "assistant", "content": whole.content}, *ASK["messages"]]
    again = claude.messages.create(**{**ASK, "messages": turns, "max_tokens": 1})
    bare: Any = [*ASK["messages"], {"role": "assistant", "content": said.text}, *ASK["messages"]]
    counted = claude.messages.count_tokens(model=MODEL, messages=bare)
    assert counted.input_tokens == again.usage.input_tokens + (again.usage.cache_read_input_tokens or 0)


def test_responses_has_an_item_of_reasoning_and_its_events(server: Server, said: Said) -> None:
    create = server.client.responses.create
    whole = create(model=MODEL, input=QUESTION)
    reasoning, message = whole.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert [each.text for each in reasoning.content] == [said.thought]
    assert (message.type, whole.output_text, whole.status) == ("message", said.text, "completed")
    events = list(create(model=MODEL, input=QUESTION, stream=True))
    deltas = [each for each in events if each.type == "response.reasoning_text.delta"]
    assert "".join(each.delta for each in deltas) == said.thought
    (done,) = [each for each in events if each.type == "response.reasoning_text.done"]
    assert (done.text, {each.item_id for each in deltas}) == (said.thought, {done.item_id})
    kinds = [each.type.removeprefix("response.") for each in events]
    firsts = sorted(("reasoning_text.delta", "reasoning_text.done", "output_text.delta"), key=kinds.index)
    assert firsts == ["reasoning_text.delta", "reasoning_text.done", "output_text.delta"]
    assert [each.sequence_number for each in events] == list(range(len(events)))
    items = [each.to_dict() for each in whole.output]
    turns: Any = [{"role": "user", "content": QUESTION}, *items, {"role": "user", "content": "Is milk white?"}]
    follows = create(model=MODEL, previous_response_id=whole.id, input="Is milk white?", max_output_tokens=1)
    sent = create(model=MODEL, input=turns, max_output_tokens=1)
    assert sent.usage.input_tokens == follows.usage.input_tokens > whole.usage.input_tokens  # type: ignore[union-attr]


def test_what_is_cut_while_it_thinks_has_said_nothing(
    server: Server, claude: anthropic.Anthropic, said: Said
) -> None:
    """A model may not close its thoughts in time: no thought is told as an answer."""
    choice = server.client.chat.completions.create(**{**ASK, "max_tokens": said.cut_tokens}).choices[0]
    thought = (choice.message.model_extra or {})["reasoning"]
    assert said.thought.startswith(thought)
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    message = claude.messages.create(**{**ASK, "max_tokens": said.cut_tokens})
    assert [(each.type, each.thinking) for each in message.content] == [("thinking", thought)]
    with claude.messages.stream(**{**ASK, "max_tokens": said.cut_tokens}) as stream:
        assert stream.get_final_message().content == message.content
    assert message.stop_reason == "max_tokens"
    response = server.client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=said.cut_tokens)
    (item,) = response.output
    assert (item.type, item.status, response.status) == ("reasoning", "incomplete", "incomplete")  # type: ignore[union-attr]
    assert response.output_text == ""
