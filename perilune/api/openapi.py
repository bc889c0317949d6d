"""GET /openapi.json: the description of this API that tools read (OpenAPI 3.1), made of the table of operations.

Knows OpenAPI; the operations and replies are openapi_operations.py's, the bodies' schemas pydantic's of the wire
models. Of streams the events are described as OpenAPI 3.2 does it, under `x-itemSchema`: few tools read 3.2 yet.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib import resources
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

import perilune
from perilune.api.openapi_operations import OPERATIONS, SCHEMAS
from perilune.api.operations.table import USUAL, Operation, Query, Schema, ref, shape, some
from perilune.api.wire import json_response

PATH = "/openapi.json"
_REF = "#/components/schemas/{model}"
_REASONS = {
    400: "The request is wrong; `param` names the field.",
    401: "No key, or an unknown one.",
    403: "The key, the host or the text's place forbids it.",
    404: "Nothing of this name, or another tenant's.",
    408: "The request stopped arriving.",
    409: "The state of what is named forbids it.",
    413: "Too large.",
    422: "A document that can't be used.",
    429: "A limit of the key, or a full queue: `code` says which.",
    431: "Headers too large.",
    500: "The server failed.",
    502: "A backend failed.",
    503: "Starting, stopping or full: try again after `retry-after`.",
}


async def openapi(request: Request) -> Response:
    return json_response(document())


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """The whole description. Takes a tenth of a second the first time."""
    bodies = list(dict.fromkeys(each.body for each in OPERATIONS if each.body is not None))
    names, defined = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    refs: dict[type[BaseModel], Any] = {body: names[body, "validation"] for body in bodies}
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, refs)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Perilune",
            "version": perilune.__version__,
            "description": "OpenAI's and Anthropic's APIs, and Perilune's own. docs/api.md explains every field.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": {**defined.get("$defs", {}), **SCHEMAS, **_perilune_object(), **_ERRORS},
            "headers": _HEADERS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _perilune_object() -> dict[str, Schema]:
    """Its own schema, whose parts have names in the document."""
    text = resources.files("perilune.api").joinpath("perilune-object.schema.json").read_text(encoding="utf-8")
    found = json.loads(text.replace('"#/$defs/', '"#/components/schemas/PeriluneObject.'))
    parts = {f"PeriluneObject.{name}": part for name, part in found.pop("$defs").items()}
    return {"PeriluneObject": {name: found[name] for name in found if not name.startswith("$")}, **parts}


_TEXT: Schema = {"type": "string"}
_PERHAPS_TEXT: Schema = {"type": ["string", "null"]}
_ERRORS: dict[str, Schema] = {
    "Error": shape(error=shape(message=_TEXT, type=_TEXT, param=_PERHAPS_TEXT, code=_TEXT)),
    "AnthropicError": shape(
        type={"const": "error"}, error=shape(type=_TEXT, message=_TEXT), request_id=_PERHAPS_TEXT
    ),
}
_HEADERS = {
    "x-request-id": {"schema": {"type": "string"}, "description": "The request's id, as the log has it."},
    "request-id": {"schema": {"type": "string"}, "description": "The same, for Anthropic's clients."},
    "retry-after": {"schema": {"type": "string"}, "description": "Seconds until trying again may help."},
    "retry-after-ms": {"schema": {"type": "string"}, "description": "The same in milliseconds."},
    "x-should-retry": {"schema": {"type": "string"}, "description": "`false` where trying again is in vain."},
    "www-authenticate": {"schema": {"type": "string"}},
    "openai-processing-ms": {"schema": {"type": "string"}},
    "perilune-ignored-fields": {"schema": {"type": "string"}, "description": "Fields that changed nothing."},
    **{
        f"x-ratelimit-{what}-{unit}": {"schema": {"type": "string"}}
        for what in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    },
}


def _operation(each: Operation, refs: dict[type[BaseModel], Any]) -> dict[str, Any]:
    name = re.sub(r"[^a-z0-9]+", "_", f"{each.method} {each.path}".lower()).strip("_")
    found: dict[str, Any] = {
        "operationId": name,
        "summary": each.summary,
        "parameters": [*_path_parameters(each.path), *map(_query, each.queries)],
        "responses": _responses(each),
    }
    if each.body is not None:
        content = {"application/json": {"schema": refs[each.body]}}
        found["requestBody"] = {"required": not each.may_be_empty, "content": content}
    elif each.form is not None:
        found["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": each.form}}}
    if each.open:
        found["security"] = []
    return found


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _query(query: Query) -> dict[str, Any]:
    return {"name": query.name, "in": "query", "required": query.required, "schema": query.schema}


def _responses(each: Operation) -> dict[str, Any]:
    usual = ("x-request-id", "request-id")
    ok = {"description": "Done.", "content": _content(each), "headers": _refs(*usual)}
    schema = ref("AnthropicError" if "/messages" in each.path else "Error")
    responses: dict[str, Any] = {"200": ok}
    for status in sorted({*USUAL, *each.fails}):
        headers = [*usual, *_of_status(status)]
        own = each.busy if status == 503 else None
        shown = {"application/json": {"schema": schema if own is None else some(schema, own)}}
        responses[str(status)] = {"description": _REASONS[status], "content": shown, "headers": _refs(*headers)}
    return responses


def _content(each: Operation) -> dict[str, Any]:
    """Media type -> what a reply of it holds."""
    found: dict[str, Any] = {media: {"schema": _TEXT} for media in each.texts}
    if each.answer is not None:
        found["application/json"] = {"schema": each.answer}
    if each.events is not None:  # without a schema: some tools take it for the whole reply's, some for each event's
        found["text/event-stream"] = {"x-itemSchema": ref(each.events)}
    if each.lines is not None:
        found["application/jsonl"] = {"schema": _TEXT, "x-itemSchema": ref(each.lines)}
    return found


def _of_status(status: int) -> tuple[str, ...]:
    if status == 401:
        return ("www-authenticate",)
    if status == 429:
        return (
            "retry-after",
            "retry-after-ms",
            "x-should-retry",
            *(name for name in _HEADERS if "ratelimit" in name),
        )
    return ("retry-after", "retry-after-ms") if status == 503 else ()


def _refs(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}
