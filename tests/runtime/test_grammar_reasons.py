"""Why a grammar is refused is told in our own words, with what to mend and where; the library's stay out."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.core import Grammar, GrammarKind
from perilune.runtime.grammar_reasons import reason
from perilune.runtime.grammar_source import CannotFollow, Words, compiled, vocabulary

KNOWN = vocabulary(Words([bytes([byte]) for byte in range(256)], [], [0], lambda text: list(text.encode())))

SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "foo"}, 'there is no type "foo"'),
    ({"type": "limit="}, 'there is no type "limit="'),
    ({"$ref": "#/x"}, 'the reference "#/x" leads nowhere'),
    ({"$ref": "http://x/y"}, 'it refers to "http://x/y", and other documents aren\'t fetched'),
    ({"pattern": "("}, "a group of the regular expression isn't closed"),
    ({"type": "string", "format": "foo"}, 'the format "foo" isn\'t known'),
    ({"not": {"type": "string"}}, 'it uses "not", which isn\'t supported'),
    ({"uniqueItems": True, "x" * 99: 1}, "it uses"),
    ({"type": "integer", "minimum": 5, "maximum": 1}, '"minimum" is greater than its counterpart'),
    ({"enum": []}, "no value fits it"),
    ({"oneOf": [{"type": "string"}, {"type": "string"}]}, "use anyOf"),
    ({"items": 5}, "neither an object nor true or false"),
    ({"required": "a"}, 'the value of "required"'),
    ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "no text at all fits it"),
    ({"x-guidance": {"foo": 1}}, "it isn't a JSON Schema, or uses what isn't supported"),
    (5, "the schema must be an object"),
]
OTHERS = [
    (GrammarKind.JSON_SCHEMA, "{", "its JSON is none"),
    (GrammarKind.REGEX, "ab(unclosed", "a group of the regular expression isn't closed (character 3)"),
    (GrammarKind.REGEX, "(limit=", "a group of the regular expression isn't closed (character 1)"),
    (GrammarKind.REGEX, "a)", "a group of the regular expression is closed that wasn't opened (character 2)"),
    (GrammarKind.REGEX, "*a", "there is nothing to repeat before *, +, ? or {} (character 1)"),
    (GrammarKind.REGEX, "(?=a)b", "it looks at what is around"),
    (GrammarKind.REGEX, r"\ba", "it looks at what is around"),
    (GrammarKind.REGEX, r"(a)\1", "it refers back to a group, which isn't supported (character 4)"),
    (GrammarKind.REGEX, r"[^\s\S]", "no text at all fits it"),
    (GrammarKind.REGEX, "(" * 500 + ")" * 500, "its groups are nested too deeply"),
    (GrammarKind.LARK, "start: foo", 'nothing is called "foo" (line 1, column 8)'),
    (GrammarKind.LARK, "start: A\nA: A", 'the token "A" refers to itself (line 2, column 4)'),
    (GrammarKind.LARK, 'foo: "a"', "it has no rule that is called start"),
    (GrammarKind.LARK, "start: $", "it isn't in Lark's notation, or uses what isn't supported (line 1, column 8)"),
    (GrammarKind.LARK, "start: <tool>", "it isn't in Lark's notation, or uses what isn't supported"),
    (GrammarKind.LARK, "start: /(/", "a group of the regular expression isn't closed (line 1, column 8)"),
    (GrammarKind.LARK, 'start: %json {"type": "foo"}', 'there is no type "foo" (line 1, column 8)'),
    (GrammarKind.LARK, "%import foo.BAR\nstart: BAR", 'there is no "foo.BAR" to import (line 1, column 1)'),
]
LIBRARYS = re.compile(r"parse error|Bias|verbose|panic|backtrace|<|Unimplemented|coerce|option|guidance|\n| {2}")


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [*((GrammarKind.JSON_SCHEMA, json.dumps(schema), words) for schema, words in SCHEMAS), *OTHERS],
    ids=lambda each: str(each)[:24],
)
def test_the_reason_is_in_our_words(kind: GrammarKind, source: str, words: str) -> None:
    with pytest.raises(CannotFollow) as found:
        compiled(KNOWN, Grammar(kind, source))
    assert words in str(found.value)
    assert not LIBRARYS.search(str(found.value))


@given(st.sampled_from(GrammarKind), st.text())
def test_no_text_of_the_library_is_passed_on(kind: GrammarKind, told: str) -> None:
    assert reason(kind, f"panic: {told}") == reason(kind, "")
    assert reason(kind, f"nobody knows this Q{told}Q").startswith(("it ", "its ", "no text"))
    assert len(reason(kind, f"Invalid type: {told * 100}")) < 120
