"""The grammar of an answer that may, or must, call tools: whatever the model's numbers, a call is one that exists.

Knows Lark's notation as llguidance reads it. Text may stand before calls where the choice is `auto`; a call's JSON
follows its tool's schema, strictly for `strict` tools, else as far as the schema's keywords are known.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from perilune.core import Grammar, GrammarKind, Tool, ToolMode, Tools
from perilune.errors import InvalidRequest
from perilune.service.tools.formats import ToolFormat

_TEXT = r"TEXT: /(.|\n)*/"
_PARAM = "tools"


def tools_grammar(tools: Tools, notation: ToolFormat) -> Grammar | None:
    """None where no call is wanted. Raises `InvalidRequest` for a choice of a tool that isn't there."""
    if tools.mode is ToolMode.NONE or not tools.offered:
        return None
    chosen = _chosen(tools)
    several = tools.parallel and not notation.is_bare and tools.name is None
    free = tools.mode is ToolMode.AUTO
    rules = [_rule(index, tool, notation, free) for index, tool in enumerate(chosen)]
    call = " | ".join(f"call_{index}" for index in range(len(chosen)))
    if free:
        start = f"({call})* said" if several else f"said | {call}"
        head = [f"start: {start}", "said: TEXT", _TEXT]
    else:
        head = [f"start: one (/\\n?/ one)*\none: {call}" if several else f"start: {call}"]
    return Grammar(GrammarKind.LARK, "\n".join(["%llguidance {}", *head, *rules]), _PARAM)


def _chosen(tools: Tools) -> Sequence[Tool]:
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


def _schema(tool: Tool) -> str:
    options = {"whitespace_pattern": " ?", "lenient": not tool.strict}
    return json.dumps({**json.loads(tool.parameters), "x-guidance": options})
