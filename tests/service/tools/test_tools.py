"""What models are told of tools, and that their calls exist, whatever they would rather say."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perilune.core import (
    ChoiceFinished,
    FinishReason,
    Grammar,
    GrammarKind,
    Message,
    Request,
    SamplingParams,
    TextDelta,
    TextPart,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolMode,
    Tools,
)
from perilune.errors import InvalidRequest
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.grammar import GrammarCompiler
from perilune.runtime.tokenizer import ModelTokenizer, load_tokenizer
from perilune.service.tools.formats import Hermes, Llama3, ToolFormat, format_of
from perilune.service.tools.grammar import tools_grammar
from perilune.service.tools.parse import CallBegan, CallParser, CallWrote, Said
from perilune.service.tools.stream import ToolStream, prepared

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "北京"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SUM = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
WEATHER, ADD = Tool("weather", "Weather of a city", json.dumps(CITY), strict=True), Tool("add", "", json.dumps(SUM))
SCHEMAS = {"weather": CITY, "add": SUM}
BOTH = (WEATHER, ADD)


def said(role: str, text: str, **more: object) -> Message:
    return Message(role, (TextPart(text),) if text else (), **more)  # type: ignore[arg-type]


def asked(*messages: Message, tools: Tools = Tools(BOTH), **more: object) -> Request:  # noqa: B008
    return Request("req_1", "local", "m", messages, 0.0, tools=tools, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> ModelTokenizer:
    return load_tokenizer(open_checkpoint(smollm2_path))


@pytest.fixture(scope="module")
def compiler(tokenizer: ModelTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def write(
    compiler: GrammarCompiler,
    tokenizer: ModelTokenizer,
    tools: Tools,
    notation: ToolFormat,
    seed: int,
    form: Grammar | None = None,
    likes: str | None = None,
) -> str:
    """What a model of random numbers, that likes to begin calls (or this text), writes."""
    grammar = tools_grammar(tools, notation, form)
    assert grammar is not None
    constraint, random, ids = compiler.constrain(grammar), np.random.default_rng(seed), []
    liked = list(dict.fromkeys([*tokenizer.encode(likes or notation.marker), *tokenizer.stop_ids]))
    for _ in range(300):
        scores = random.normal(0, 1, tokenizer.vocab_size)
        scores[liked] += 4
        scores[~constraint.allowed(tokenizer.vocab_size)] = -np.inf
        token = int(scores.argmax())
        if token in tokenizer.stop_ids:
            return tokenizer.decode(ids)
        constraint.accept(token)
        ids.append(token)
    raise AssertionError(tokenizer.decode(ids))


def calls_in(text: str, notation: ToolFormat) -> list[tuple[str, str]]:
    parser, calls = CallParser(notation), []
    for piece in [*parser.push(text), *parser.flush()]:
        match piece:
            case CallBegan(_, name):
                calls.append((name, ""))
            case CallWrote(index, arguments):
                calls[index] = (calls[index][0], calls[index][1] + arguments)
            case Said(_):
                pass
    return calls


@pytest.mark.parametrize("notation", [Hermes(), Llama3()], ids=["hermes", "llama3"])
@given(
    seed=st.integers(0, 10_000), mode=st.sampled_from([ToolMode.AUTO, ToolMode.REQUIRED]), parallel=st.booleans()
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_call_is_one_that_exists(
    compiler: GrammarCompiler,
    tokenizer: ModelTokenizer,
    notation: ToolFormat,
    seed: int,
    mode: ToolMode,
    parallel: bool,
) -> None:
    text = write(compiler, tokenizer, Tools(BOTH, mode, None, parallel), notation, seed)
    calls = calls_in(text, notation)
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    if mode is ToolMode.REQUIRED:
        assert calls
    if not parallel:
        assert len(calls) <= 1


def test_the_named_tool_is_called(compiler: GrammarCompiler, tokenizer: ModelTokenizer) -> None:
    named = Tools(BOTH, ToolMode.REQUIRED, "add")
    for seed in range(3):
        assert [name for name, _ in calls_in(write(compiler, tokenizer, named, Hermes(), seed), Hermes())] == [
            "add"
        ]
    with pytest.raises(InvalidRequest):
        tools_grammar(Tools(BOTH, ToolMode.REQUIRED, "fly"), Hermes())


def test_unknown_keywords_are_refused_only_where_strict(compiler: GrammarCompiler) -> None:
    odd = json.dumps({"type": "object", "properties": {"x": {"type": "string", "format": "made-up"}}})
    for strict in (False, True):
        grammar = tools_grammar(Tools((Tool("f", "", odd, strict),)), Hermes())
        assert grammar is not None
        if not strict:
            compiler.constrain(grammar)
            continue
        with pytest.raises(InvalidRequest) as refused:
            compiler.constrain(grammar)
        assert refused.value.param == "tools"


def test_the_model_is_told_of_tools_calls_and_results() -> None:
    call = ToolCall("call_1", "weather", '{"city": "Oslo"}')
    request = asked(
        said("system", "Be brief."),
        said("user", "How is it in Oslo?"),
        said("assistant", "", tool_calls=(call, ToolCall("call_2", "add", '{"a": 1}'))),
        said("tool", "rain", tool_call_id="call_1"),
        said("tool", "1", tool_call_id="call_2"),
        said("user", "And now?"),
    )
    ready = prepared(request, Hermes())
    system, question, made, results, _ = ready.messages
    assert system.text.startswith("Be brief.\n\n# Tools")
    assert '"name": "weather"' in system.text
    assert question.text == "How is it in Oslo?"
    assert made.text.count("<tool_call>") == 2
    assert json.loads(made.text.split("\n")[1]) == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert results.role == "tool"
    assert results.text == "<tool_response>\nrain\n</tool_response>\n<tool_response>\n1\n</tool_response>"
    assert ready.sampling.grammar is not None


def test_none_offers_nothing_but_reads_what_was_called() -> None:
    ready = prepared(asked(said("user", "Hi"), tools=Tools(BOTH, ToolMode.NONE)), Hermes())
    assert ready.sampling.grammar is None
    assert ready.messages == (said("user", "Hi"),)


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(InvalidRequest) as lonely:
        prepared(asked(said("user", "Hi"), said("tool", "rain", tool_call_id="call_9")), Hermes())
    assert lonely.value.param == "messages[1].tool_call_id"
    form = Grammar(GrammarKind.REGEX, "a+", "structured_outputs.regex")
    with pytest.raises(InvalidRequest) as both:
        prepared(asked(said("user", "Hi"), sampling=SamplingParams(grammar=form)), Hermes())
    assert both.value.param == "structured_outputs.regex"


@pytest.mark.parametrize("notation", [Hermes(), Llama3()], ids=["hermes", "llama3"])
def test_an_answer_is_calls_or_of_the_form(
    compiler: GrammarCompiler, tokenizer: ModelTokenizer, notation: ToolFormat
) -> None:
    schema = {"type": "object", "properties": {"ok": {"enum": [True]}}, "required": ["ok"]}
    form = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**schema, "additionalProperties": False}))
    seen = set()
    for seed in range(12):
        likes = '{"ok": true}' if seed % 2 else None
        text = write(compiler, tokenizer, Tools(BOTH), notation, seed, form, likes)
        calls = calls_in(text, notation)
        seen.add(bool(calls))
        if not calls:
            assert json.loads(text) == {"ok": True}
    assert seen == {True, False}


def test_only_allowed_tools_are_called(compiler: GrammarCompiler, tokenizer: ModelTokenizer) -> None:
    some = Tools(BOTH, ToolMode.REQUIRED, allowed=("add",))
    for seed in range(3):
        calls = calls_in(write(compiler, tokenizer, some, Hermes(), seed), Hermes())
        assert {name for name, _ in calls} == {"add"}
    assert "weather" in prepared(asked(said("user", "Hi"), tools=some), Hermes()).messages[0].text


def test_events_become_calls() -> None:
    stream = ToolStream(Hermes(), 1)
    text = "Let me see. " + Hermes().call(ToolCall("", "weather", '{"city": "Oslo"}'))
    events = [item for char in text for item in stream.translate(TextDelta(0, char))]
    events += stream.translate(ChoiceFinished(0, FinishReason.STOP))
    assert "".join(item.text for item in events if isinstance(item, TextDelta)) == "Let me see."
    calls = [item for item in events if isinstance(item, ToolCallDelta)]
    assert calls[0].name == "weather"
    assert calls[0].call_id
    assert "".join(call.arguments for call in calls) == '{"city": "Oslo"}'
    assert events[-1] == ChoiceFinished(0, FinishReason.TOOL_CALLS)
    plain = [*ToolStream(Hermes(), 1).translate(ChoiceFinished(0, FinishReason.STOP))]
    assert plain == [ChoiceFinished(0, FinishReason.STOP)]


def test_a_call_that_a_stop_string_cuts_isnt_offered_as_one() -> None:
    stream = ToolStream(Hermes(), 1)
    text = Hermes().call(ToolCall("", "weather", '{"city": "Oslo"}'))
    events = [*stream.translate(TextDelta(0, text[: text.index("city")]))]
    assert any(isinstance(item, ToolCallDelta) for item in events)
    assert [*stream.translate(ChoiceFinished(0, FinishReason.STOP))] == [ChoiceFinished(0, FinishReason.STOP)]


def test_the_notation_follows_the_template() -> None:
    assert isinstance(format_of("{{ '<|start_header_id|>ipython' }}"), Llama3)
    assert isinstance(format_of("<tool_call>"), Hermes)
    assert isinstance(format_of("<|im_start|>"), Hermes)
