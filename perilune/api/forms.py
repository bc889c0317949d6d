"""The form that a caller wants an answer in: `response_format` and `structured_outputs` on the wire (spec S1).

Knows the fields; doesn't know how a form is enforced. `response_format` is OpenAI's, `structured_outputs` vLLM's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from perilune.api.limits import parse_json_object
from perilune.core import Grammar, GrammarKind
from perilune.errors import InvalidRequest

MAX_CHOICES_OF_FORM = 1024
_ANY_OBJECT = json.dumps({"type": "object"})


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class WireSchema(_Form):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = Field(None, max_length=65_536)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class WireResponseFormat(_Form):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: WireSchema | None = None


class WireStructured(_Form):
    """One of the four. `grammar` is Lark's notation, as llguidance reads it."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = Field(None, max_length=65_536)
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES_OF_FORM)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def grammar_of(response_format: WireResponseFormat | None, structured: WireStructured | None) -> Grammar | None:
    """The one form that is asked for. Raises `InvalidRequest` for two of them, or one without its content."""
    first = _of_format(response_format) if response_format is not None else None
    if structured is None:
        return first
    if first is not None:
        raise InvalidRequest(
            "response_format and structured_outputs both ask for a form.",
            hint="Send one.",
            param="structured_outputs",
        )
    return _of_structured(structured)


def _of_format(wire: WireResponseFormat) -> Grammar | None:
    if wire.type == "text":
        return None
    if wire.type == "json_object":
        return Grammar(GrammarKind.JSON_SCHEMA, _ANY_OBJECT)
    if wire.json_schema is None:
        raise InvalidRequest(
            "response_format is json_schema, but has no json_schema.",
            hint='Send {"type": "json_schema", "json_schema": {"name": …, "schema": …}}.',
            param="response_format.json_schema",
        )
    schema = wire.json_schema.schema_
    source = _ANY_OBJECT if schema is None else json.dumps(schema)
    return Grammar(GrammarKind.JSON_SCHEMA, source, "response_format.json_schema.schema")


def _of_structured(wire: WireStructured) -> Grammar:
    given = [name for name in ("json_", "regex", "choice", "grammar") if getattr(wire, name) is not None]
    if len(given) + bool(wire.json_object) != 1:
        raise InvalidRequest(
            "structured_outputs needs exactly one of json, json_object, regex, choice and grammar.",
            hint="Send one form.",
            param="structured_outputs",
        )
    if wire.json_object:
        return Grammar(GrammarKind.JSON_SCHEMA, _ANY_OBJECT, "structured_outputs.json_object")
    if wire.json_ is not None:
        schema = _parsed(wire.json_) if isinstance(wire.json_, str) else wire.json_
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), "structured_outputs.json")
    if wire.regex is not None:
        return Grammar(GrammarKind.REGEX, wire.regex, "structured_outputs.regex")
    if wire.choice is not None:
        return Grammar(GrammarKind.REGEX, _one_of(wire.choice), "structured_outputs.choice")
    return Grammar(GrammarKind.LARK, wire.grammar or "", "structured_outputs.grammar")


def _parsed(schema: str) -> dict[str, Any]:
    """A schema that came as text, under the bounds of every JSON that comes."""
    try:
        return parse_json_object(schema.encode())
    except InvalidRequest:
        raise InvalidRequest(
            "structured_outputs.json is no JSON object, or is nested too deeply.",
            hint="Send the schema as an object.",
            param="structured_outputs.json",
        ) from None


def _one_of(choices: Sequence[str]) -> str:
    return "|".join(f"({re.escape(choice)})" for choice in choices)
