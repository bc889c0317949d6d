"""The items of OpenAI's Responses and Conversations: how they come, what is kept of them, and as which messages
models read them.

Knows the dialect's items; doesn't know requests, or where items are kept. A `compaction` item stands for the
answers, calls and results before it (`service/compaction.py`); what users said before it stays as it is.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from perilune.api.errors import Unsupported
from perilune.api.schema import MAX_PARTS, wrong_field
from perilune.api.tools import Name, WireCall, WireCalled, calls_of
from perilune.api.wire import Wire
from perilune.core import FilePart, Message, TextPart, ToolCall
from perilune.errors import InvalidRequest

Item = Mapping[str, Any]

MAX_SUMMARY_CHARS = 1 << 20
_COMPACTED = "perilune-1."
_ITEM_ID = "^[!-~]{1,80}$"
_PREFIX = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "file_search_call": "fs",
}


def as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _as_parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class WirePart(Wire):
    type: str = Field(max_length=64)
    text: str | None = None
    file_id: str | None = Field(None, max_length=128)
    refusal: str | None = None


Parts = Annotated[
    list[WirePart],
    BeforeValidator(_as_parts, json_schema_input_type=str | list[WirePart]),
    Field(max_length=MAX_PARTS),
]


class WireItem(Wire):
    """Any item; which fields count depends on `type`."""

    type: str = Field("message", max_length=64)
    id: str | None = Field(None, pattern=_ITEM_ID)
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    call_id: str | None = Field(None, min_length=1, max_length=256)
    name: Name | None = None
    arguments: str | None = Field(None, max_length=1 << 20)
    output: Parts | None = None
    summary: Parts | None = None
    encrypted_content: str | None = Field(None, max_length=2 * MAX_SUMMARY_CHARS)


class _Items(Wire):
    input: list[WireItem]


_ITEM_FIELDS = frozenset({*WireItem.model_fields, "status"})


def read_items(items: Sequence[Item]) -> list[WireItem]:
    """Items that were checked when they came. Raises `InvalidRequest`."""
    try:
        return _Items.model_validate({"input": list(items)}).input
    except ValidationError as error:
        raise wrong_field(error) from None


def kept(item: Item) -> dict[str, Any]:
    """An item without the fields that nobody reads: else anything could be stored with it."""
    found = {name: value for name, value in item.items() if name in _ITEM_FIELDS}
    for name in ("content", "output", "summary"):
        if isinstance(found.get(name), list):
            parts = [{key: part[key] for key in part if key in WirePart.model_fields} for part in found[name]]
            found[name] = parts
    return found


def named(item: Item, status: str = "completed") -> dict[str, Any]:
    """An input item as it is listed: with an id of its own, and its content as parts."""
    kind = item.get("type", "message")
    content = item.get("content")
    shown = {**item}
    if isinstance(content, str):
        text = "output_text" if item.get("role") == "assistant" else "input_text"
        part: dict[str, Any] = {"type": text, "text": content}
        shown["content"] = [part | ({"annotations": []} if text == "output_text" else {})]
    if kind != "compaction":
        shown |= {"status": status}
    return {**shown, "type": kind, "id": f"{_PREFIX.get(kind, 'item')}_{secrets.token_hex(16)}"}


# ---------------------------------------------------------------------------------------------------- compaction


def compaction_item(summary: str) -> dict[str, Any]:
    """What stands for earlier answers. Not secret: whoever has it had what it was made of."""
    packed = base64.urlsafe_b64encode(zlib.compress(summary.encode())).decode()
    return {"id": f"cmp_{secrets.token_hex(16)}", "type": "compaction", "encrypted_content": _COMPACTED + packed}


def _summary(item: WireItem, param: str) -> str:
    """Raises `InvalidRequest` for what this server hasn't made."""
    packed = (item.encrypted_content or "").removeprefix(_COMPACTED)
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(base64.urlsafe_b64decode(packed), 4 * MAX_SUMMARY_CHARS)
        if not unpacking.eof:
            raise ValueError
        return text.decode()
    except (binascii.Error, zlib.error, ValueError):
        raise InvalidRequest(
            f"{param} is no compaction of this server.",
            hint="Send the item as POST /v1/responses/compact gave it.",
            param=f"{param}.encrypted_content",
        ) from None


# ------------------------------------------------------------------------------------------------------ messages


def messages_of(items: Sequence[WireItem], instructions: str | None) -> Iterator[Message]:
    """Calls in a row are one assistant message, with the text before them, as models' templates have it."""
    if instructions:
        yield Message("system", (TextPart(instructions),))
    said: tuple[TextPart | FilePart, ...] | None = None  # of an assistant, waiting for its calls
    calls: list[ToolCall] = []
    last = max((index for index, item in enumerate(items) if item.type == "compaction"), default=-1)
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if index < last and (item.type != "message" or item.role == "assistant"):
            continue  # the compaction stands for it
        if item.type == "function_call":
            calls += _call(item, place)
            continue
        if item.type in ("reasoning", "file_search_call"):
            continue  # what was thought or found before isn't said again
        if said is not None or calls:
            yield Message("assistant", said or (), tuple(calls))
            said, calls = None, []
        message = _message(item, place)
        if message.role == "assistant":
            said = message.parts
        else:
            yield message
    if said is not None or calls:
        yield Message("assistant", said or (), tuple(calls))


def _message(item: WireItem, param: str) -> Message:
    if item.type == "compaction":
        return Message("assistant", (TextPart(_summary(item, param)),))
    if item.type == "function_call_output":
        if item.call_id is None or item.output is None:
            raise InvalidRequest(f"{param} has no call_id or no output.", param=param)
        return Message("tool", _parts(item.output, f"{param}.output"), tool_call_id=item.call_id)
    if item.type != "message" or item.role is None:
        raise Unsupported(
            f"{param} is of a type this server can't read.",
            hint="It takes message, function_call, function_call_output, reasoning and compaction.",
            param=f"{param}.type",
        )
    if not item.content:
        raise InvalidRequest(f"{param} has no content.", hint="Send a text.", param=f"{param}.content")
    role = "system" if item.role == "developer" else item.role
    return Message(role, _parts(item.content, f"{param}.content"))


def _parts(wire: Sequence[WirePart], param: str) -> tuple[TextPart | FilePart, ...]:
    return tuple(_part(part, f"{param}[{index}]") for index, part in enumerate(wire))


def _part(part: WirePart, param: str) -> TextPart | FilePart:
    if part.type in ("input_text", "output_text", "text") and part.text is not None:
        return TextPart(part.text)
    if part.type == "refusal":
        return TextPart(part.refusal or "")
    if part.type == "input_file" and part.file_id:
        return FilePart(part.file_id)
    raise Unsupported(
        f"{param} is of a type this server can't read; it takes input_text, output_text and input_file by file_id.",
        hint="Upload documents with POST /v1/files and name them by id.",
        param=f"{param}.type",
    )


def _call(item: WireItem, param: str) -> tuple[ToolCall, ...]:
    if item.call_id is None or item.name is None:
        raise InvalidRequest(f"{param} has no call_id or no name.", hint="Send it as it was answered.", param=param)
    called = WireCalled(name=item.name, arguments=item.arguments or "{}")
    return calls_of([WireCall(id=item.call_id, function=called)], param)
