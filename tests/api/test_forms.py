"""Forms of answers on the wire: which grammar they mean, and which mistakes are told."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from perilune.core import Grammar, GrammarKind
from perilune.errors import InvalidRequest
from tests.api.test_schema import GOOD, parse, refused

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def form(**body: Any) -> Grammar | None:
    return parse({**GOOD, **body}).request.sampling.grammar


def test_response_formats() -> None:
    assert form() is None
    assert form(response_format={"type": "text"}) is None
    anything = form(response_format={"type": "json_object"})
    assert anything is not None
    assert json.loads(anything.source) == {"type": "object"}
    given = form(
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    )
    assert given is not None
    assert given.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(given.source) == SCHEMA


def test_structured_outputs() -> None:
    choice = form(structured_outputs={"choice": ["yes.", "no?"]})
    assert choice is not None
    assert choice.kind is GrammarKind.REGEX
    assert [text for text in ("yes.", "yesx", "no?", "no") if re.fullmatch(choice.source, text)] == ["yes.", "no?"]
    for body, kind in (
        ({"json": SCHEMA}, GrammarKind.JSON_SCHEMA),
        ({"json": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA),
        ({"json_object": True}, GrammarKind.JSON_SCHEMA),
        ({"regex": "a+"}, GrammarKind.REGEX),
        ({"grammar": 'start: "a"'}, GrammarKind.LARK),
    ):
        found = form(structured_outputs=body)
        assert found is not None
        assert found.kind is kind


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_mistakes_are_told(body: dict[str, Any], param: str) -> None:
    error = refused({**GOOD, **body})
    assert isinstance(error, InvalidRequest)
    assert error.param == param
