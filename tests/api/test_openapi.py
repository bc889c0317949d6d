"""The OpenAPI document: every route of the application is in it, and nothing else; it is valid."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from perilune.api.app import create_app
from perilune.api.openapi import document
from perilune.config import ServerSettings, Settings
from perilune.ops.metrics import PrometheusSink
from perilune.telemetry import Telemetry

from .conftest import Serve
from .fakes import MODEL, FakeService


def test_every_route_is_described_and_nothing_else(tmp_path: Path) -> None:
    settings, metrics = Settings(home=tmp_path, server=ServerSettings(web=False)), PrometheusSink(MODEL)
    app = create_app(FakeService(), settings, telemetry=Telemetry(metrics), metrics=metrics)
    routes = {
        (method, re.sub(r":path}", "}", route.path))
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    described = {(method.upper(), path) for path, each in document()["paths"].items() for method in each}
    assert described == routes


def test_references_lead_somewhere_and_names_are_unique() -> None:
    text = json.dumps(document())
    for kind, name in re.findall(r'"#/components/(\w+)/([^"]+)"', text):
        assert name in document()["components"][kind], name
    ids = re.findall(r'"operationId": "([^"]+)"', text)
    assert len(ids) == len(set(ids)) > 60
    assert '"$ref": "#/$defs' not in text


def test_fields_with_two_spellings_show_both() -> None:
    schemas = document()["components"]["schemas"]
    chat = next(schema for name, schema in schemas.items() if name.endswith("WireChat"))
    message = next(schema for name, schema in schemas.items() if "schema" in name and name.endswith("WireMessage"))
    assert {"type": "string"} in _forms(chat["properties"]["stop"])
    assert {"type": "string"} in _forms(_forms(message["properties"]["content"])[0])


def _forms(schema: Any) -> list[Any]:
    found: list[Any] = schema.get("anyOf", [schema])
    return found


@pytest.mark.parametrize("key", ["any", ""])
async def test_the_document_is_served_to_everybody(serve: Serve, key: str) -> None:
    async with serve() as server, server.http.get("/openapi.json") as reply:
        assert reply.status == 200
        assert (await reply.json())["openapi"].startswith("3.1")
