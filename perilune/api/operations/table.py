"""What describes an operation of the HTTP API: rows of the tables in this folder, and the words their schemas are
made of.

Every object is closed: a field that no schema names is a fault of the table, and tests find it. Schemas with a name
stand under `components` of the document and are referred to by `ref`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
YES: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
ANY: Schema = {}
OBJECT: Schema = {"type": "object"}
"""Any object: one that came with the request, or whose keys are data."""

USUAL = (400, 401, 403, 408, 413, 431, 500, 503)
"""What any request can meet: a fault of its own, no key, no right, a limit, a server that starts or fails."""

ANSWERING = (404, 409, 422, 429, 502)
"""And one that asks a model: an unknown model or id, a state that forbids it, a document, a limit, a backend."""

CHANGING = (404, 409, 422)
"""And one that changes something: an unknown id, a state that forbids it, a document."""


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def some(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def or_null(schema: Schema) -> Schema:
    return some(schema, NULL)


def many(item: Schema) -> Schema:
    return {"type": "array", "items": item}


NONE: Schema = {"type": "array", "maxItems": 0}
"""An empty list."""


def shape(optional: Mapping[str, Schema] | None = None, /, **fields: Schema) -> Schema:
    """An object with these fields, all of them there, perhaps the optional ones, and no others."""
    return {
        "type": "object",
        "properties": {**fields, **(optional or {})},
        "required": list(fields),
        "additionalProperties": False,
    }


def thing(kind: str, optional: Mapping[str, Schema] | None = None, /, **fields: Schema) -> Schema:
    """A shape whose `object` says what it is."""
    return shape(optional, object={"const": kind}, **fields)


def typed(kind: str, optional: Mapping[str, Schema] | None = None, /, **fields: Schema) -> Schema:
    """A shape whose `type` says what it is."""
    return shape(optional, type={"const": kind}, **fields)


def listed(item: Schema, **more: Schema) -> Schema:
    return thing("list", data=many(item), **more)


def paged(item: Schema) -> Schema:
    """OpenAI's list, with its cursors."""
    return listed(item, first_id=or_null(TEXT), last_id=or_null(TEXT), has_more=YES)


def deleted(kind: str) -> Schema:
    return thing(kind, id=TEXT, deleted={"const": True})


def event(data: Schema, name: str | None = None) -> Schema:
    """A server-sent event, as OpenAPI 3.2's `itemSchema` describes one: its `data` is JSON of this schema."""
    content = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    fields: dict[str, Schema] = {"data": content}
    if name is not None:
        fields["event"] = {"const": name}
    return shape({"id": TEXT}, **fields)


DONE = shape({"id": TEXT}, data={"const": "[DONE]"})
"""OpenAI's last event."""


@dataclass(frozen=True, slots=True)
class Query:
    name: str
    schema: Schema
    required: bool = False


ORDER = Query("order", one_of("asc", "desc"))
AFTER = Query("after", TEXT)


def limit(most: int) -> Query:
    return Query("limit", {"type": "integer", "minimum": 1, "maximum": most})


PAGE = (limit(100), ORDER, AFTER, Query("before", TEXT))


@dataclass(frozen=True, slots=True)
class Operation:
    """`answer` is the schema of a JSON reply, `texts` are the other media types that it may have. `events` names
    the schema of a stream's events: of every reply where there is no `answer`, else of what a client may ask for;
    `lines` that of the lines of a reply in JSON Lines. `form` is a multipart body. `may_be_empty`: the body may be
    left out. `fails` are its statuses beside the usual ones; `busy` is the schema of its own 503; `open`: it needs
    no key."""

    method: str
    path: str
    summary: str
    answer: Schema | None = None
    body: type[BaseModel] | None = None
    form: Schema | None = None
    may_be_empty: bool = False
    events: str | None = None
    lines: str | None = None
    texts: tuple[str, ...] = ()
    queries: tuple[Query, ...] = ()
    fails: tuple[int, ...] = (404,)
    busy: Schema | None = None
    open: bool = False


_PLAIN: Mapping[Any, Schema] = {str: TEXT, int: WHOLE, float: NUMBER, bool: YES, type(None): NULL}


def fields_of(record: type) -> dict[str, Schema]:
    """The fields of a dataclass, as `dataclasses.asdict` shows them."""
    return {name: _field(kind) for name, kind in get_type_hints(record).items()}


def _field(kind: Any) -> Schema:
    if kind in _PLAIN:
        return _PLAIN[kind]
    inner = get_args(kind)
    if get_origin(kind) is tuple:
        return many(_field(inner[0]))
    if get_origin(kind) is Literal:
        return one_of(*inner)
    return some(*map(_field, inner)) if inner else shape(**fields_of(kind))
