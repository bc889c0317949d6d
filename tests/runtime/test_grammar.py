"""Answers of a given form: whatever the model's numbers, what comes out parses and is valid."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perilune.core import Grammar, GrammarKind, SamplingParams
from perilune.errors import InvalidRequest
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.grammar import KEPT_GRAMMARS, MAX_SOURCE_CHARS, GrammarCompiler, constraint_of
from perilune.runtime.sampler import SequenceSampler, sample_each
from perilune.runtime.tokenizer import ModelTokenizer, load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> ModelTokenizer:
    return load_tokenizer(open_checkpoint(smollm2_path))


@pytest.fixture(scope="module")
def compiler(tokenizer: ModelTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def schema(content: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(content))


def write(
    compiler: GrammarCompiler, tokenizer: ModelTokenizer, grammar: Grammar, seed: int, temperature: float = 1.0
) -> str:
    """What a model of random numbers writes under a grammar."""
    vocab = tokenizer.vocab_size + 3  # models pad their heads
    params = SamplingParams(temperature=temperature, seed=seed, grammar=grammar)
    sampler = SequenceSampler(params, [], vocab, 0, constraint_of(params, compiler))
    random = np.random.default_rng(seed)
    ids: list[int] = []
    for _ in range(400):
        token, _ = sampler.sample(random.normal(0, 3, vocab).astype(np.float32))
        if token in tokenizer.stop_ids:
            return tokenizer.decode(ids)
        ids.append(token)
    raise AssertionError(tokenizer.decode(ids))


leaves: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "integer", "minimum": -5, "maximum": 70_000}),
    st.just({"type": "string", "maxLength": 9}),
    st.just({"enum": ["rot", "绿", 3, None]}),
    st.just({"type": "string", "format": "date"}),
)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["a", "naïve", "地址", "x y"]), inner, max_size=3).map(_object),
        inner.map(lambda item: {"type": "array", "items": item, "maxItems": 2}),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=6,
)


@given(schemas, st.integers(0, 1000))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_model_says_is_valid(
    compiler: GrammarCompiler, tokenizer: ModelTokenizer, content: dict[str, Any], seed: int
) -> None:
    jsonschema.validate(json.loads(write(compiler, tokenizer, schema(content), seed)), content)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_regex_and_lark(compiler: GrammarCompiler, tokenizer: ModelTokenizer, temperature: float) -> None:
    code = Grammar(GrammarKind.REGEX, "[A-Z]{2}-[0-9]{4}")
    assert re.fullmatch("[A-Z]{2}-[0-9]{4}", write(compiler, tokenizer, code, 1, temperature))
    verdict = Grammar(GrammarKind.LARK, 'start: ("yes" | "no") ", " ("surely" | "perhaps")')
    assert re.fullmatch("(yes|no), (surely|perhaps)", write(compiler, tokenizer, verdict, 2, temperature))


def test_without_a_grammar_nothing_is_asked(compiler: GrammarCompiler) -> None:
    assert constraint_of(SamplingParams(), compiler) is None
    assert not SequenceSampler(
        SamplingParams(grammar=schema(SCHEMA)), [], 9, 0, compiler.constrain(schema(SCHEMA))
    ).plain_greedy


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.JSON_SCHEMA, "{"),
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "nonsense"}'),
        Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "#/nowhere"}'),
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "string", "format": "made-up"}'),
        Grammar(GrammarKind.REGEX, "(unclosed"),
        Grammar(GrammarKind.REGEX, "(?=ahead)x"),
        Grammar(GrammarKind.LARK, "nothing here"),
        Grammar(GrammarKind.LARK, "x" * (MAX_SOURCE_CHARS + 1)),
        Grammar(GrammarKind.JSON_SCHEMA, "[" * 100_000),
        schema({"allOf": [{"anyOf": [{"pattern": "(a|b)" * size}, {"maxLength": size}]} for size in range(12)]}),
    ],
    ids=lambda grammar: grammar.source[:24],
)
def test_what_cannot_be_followed_is_refused(compiler: GrammarCompiler, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest) as found:
        compiler.constrain(grammar)
    assert found.value.param == "response_format"
    assert found.value.hint


def test_a_pattern_of_25_million_repeats_costs_nothing(
    compiler: GrammarCompiler, tokenizer: ModelTokenizer
) -> None:
    constraint = compiler.constrain(schema({"type": "string", "pattern": "^(a{1,5000}){1,5000}$"}))
    for token in tokenizer.encode('"aaa'):
        assert constraint.allowed(tokenizer.vocab_size)[token]
        constraint.accept(token)


def test_a_hostile_pattern_takes_linear_time(compiler: GrammarCompiler, tokenizer: ModelTokenizer) -> None:
    """`(a+)+b` against a long run of a: a backtracking engine would need 2^n steps."""
    constraint = compiler.constrain(Grammar(GrammarKind.REGEX, "(a+)+b"))
    for token in tokenizer.encode("aaaaaaaa" * 50):
        assert constraint.allowed(tokenizer.vocab_size)[token]
        constraint.accept(token)


def test_sequences_go_their_own_ways(compiler: GrammarCompiler, tokenizer: ModelTokenizer) -> None:
    grammar = schema(SCHEMA)
    first, second = compiler.constrain(grammar), compiler.constrain(grammar)
    start = second.allowed(tokenizer.vocab_size).copy()
    first.accept(tokenizer.encode("{")[0])
    assert (second.allowed(tokenizer.vocab_size) == start).all()


def test_what_is_kept_is_bounded_and_threads_may_ask_together(
    compiler: GrammarCompiler, tokenizer: ModelTokenizer
) -> None:
    texts: list[str] = []

    def ask(number: int) -> None:
        texts.append(write(compiler, tokenizer, Grammar(GrammarKind.REGEX, f"n{number % 80}"), number))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2 * KEPT_GRAMMARS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == sorted(f"n{number % 80}" for number in range(2 * KEPT_GRAMMARS))
    assert len(compiler._kept) <= KEPT_GRAMMARS


def test_a_thousand_properties_that_may_all_come_are_followed(
    compiler: GrammarCompiler, tokenizer: ModelTokenizer
) -> None:
    wide = schema({"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(1000)}})
    constraint, random = compiler.constrain(wide), np.random.default_rng(0)
    for _ in range(40):
        may = np.flatnonzero(constraint.allowed(tokenizer.vocab_size))
        constraint.accept(int(random.choice(np.setdiff1d(may, list(tokenizer.stop_ids)))))


def test_a_sequence_whose_token_cant_be_chosen_takes_no_other_along(compiler: GrammarCompiler) -> None:
    params = SamplingParams(temperature=0.0, grammar=schema({"type": "null"}))
    samplers = {
        name: SequenceSampler(params, [], 49_152, 0, constraint_of(params, compiler)) for name in ("bad", "good")
    }
    numbers = np.zeros(49_152, np.float32)
    tokens, _, faults = sample_each(samplers, {"bad": np.full(49_152, np.nan, np.float32), "good": numbers})
    assert set(tokens) == {"good"}
    assert set(faults) == {"bad"}
