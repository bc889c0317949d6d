"""The grammar of an answer that may, or must, call tools: whatever the model's numbers, a call is one that exists.

Knows Lark's notation as llguidance reads it. Text may stand before calls where the choice is `auto`; a call's JSON
follows its tool's schema, strictly for `strict` tools, else as far as the schema's keywords are known.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from perilune.core import Grammar, GrammarKind, Tool, ToolMode, Tools
from perilune.errors import InvalidRequest
from perilune.service.tools.formats import ToolFormat

_TEXT = r"TEXT: /(.|\n)*/"
_PARAM = "tools"
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tools_grammar(tools: Tools, notation: ToolFormat, form: Grammar | None = None) -> Grammar | None:
    """None where no call is wanted. `form` is what an answer without calls must be.

    Raises `InvalidRequest` for a choice of a tool that isn't there, and for a form that is no JSON schema.
    """
    if tools.mode is ToolMode.NONE or not tools.offered:
        return None
    chosen = _chosen(tools)
    several = tools.parallel and not notation.is_bare and tools.name is None
    free = tools.mode is ToolMode.AUTO and form is None
    mixed = tools.mode is ToolMode.AUTO and form is not None and notation.is_bare
    rules = [
        _bare_rule(index, tool, notation) if mixed else _rule(index, tool, notation, free)
        for index, tool in enumerate(chosen)
    ]
    call = " | ".join(f"call_{index}" for index in range(len(chosen)))
    calls = f"one (/\\n?/ one)*\none: {call}" if several else call
    if free:
        start = f"({call})* said" if several else f"said | {call}"
        head = [f"start: {start}", "said: TEXT", _TEXT]
    elif tools.mode is ToolMode.AUTO and form is not None:
        head = [f"start: said | calls\ncalls: {calls}", f"said: %json {_form(form, notation)}"]
    else:
        head = [f"start: {calls}"]
    return Grammar(GrammarKind.LARK, "\n".join(["%llguidance {}", *head, *rules]), _PARAM)


def _form(form: Grammar, notation: ToolFormat) -> str:
    if form.kind is not GrammarKind.JSON_SCHEMA:
        raise InvalidRequest(
            "Beside tools, an answer can only have the form of a JSON schema.",
            hint='Send response_format, or set tool_choice to "none".',
            param=form.param,
        )
    schema: dict[str, Any] = json.loads(form.source)
    return json.dumps({**schema, "x-guidance": _SPACED if notation.is_bare else {"whitespace_pattern": " ?"}})


def _chosen(tools: Tools) -> Sequence[Tool]:
    if tools.allowed is not None:
        return [tool for tool in tools.offered if tool.name in tools.allowed]
    if tools.name is None:
        return tools.offered
    named = [tool for tool in tools.offered if tool.name == tools.name]
    if not named:
        raise InvalidRequest(
            f"tool_choice names {tools.name[:64]!r}, which isn't among the tools.",
            hint="Offer it.",
            param="tool_choice",
        )
    return named


def _rule(index: int, tool: Tool, notation: ToolFormat, free: bool) -> str:
    """One tool's call. After free text a lazy terminal ends the text at the first marker."""
    begin, name = notation.begin(tool.name), f"call_{index}"
    body = f"%json {_schema(tool)} {json.dumps('}' + notation.close)}"
    if not free or notation.is_bare:
        return f"{name}: {json.dumps(begin)} {body}"
    rest = begin.removeprefix(notation.marker)
    return f"{name}_at[lazy]: TEXT {json.dumps(notation.marker)}\n{name}: {name}_at {json.dumps(rest)} {body}"


def _bare_rule(index: int, tool: Tool, notation: ToolFormat) -> str:
    """A call that may turn out to be other JSON: of the same terminals, because the lexer takes the longest."""
    parameters = json.loads(tool.parameters)
    named = {
        key: parameters[key] for key in ("$defs", "definitions") if key in parameters
    }  # "$ref" means the root's
    properties = {"name": {"const": tool.name}, notation.arguments_key: parameters}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **named,
    }
    return f"call_{index}: %json {json.dumps({**schema, 'x-guidance': {**_SPACED, 'lenient': not tool.strict}})}"


def _schema(tool: Tool) -> str:
    options = {"whitespace_pattern": " ?", "lenient": not tool.strict}
    return json.dumps({**json.loads(tool.parameters), "x-guidance": options})
