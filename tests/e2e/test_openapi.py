"""Whatever the OpenAPI document allows, and what it doesn't, is answered as the document says: by the real server.

schemathesis makes requests of every operation; none may end with an unknown status, a form that isn't described or
a fault of the server. `make soak` makes many more.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from perilune.api.openapi import document
from perilune.api.openapi_operations import OPERATIONS
from perilune.api.operations.table import Operation
from tests.e2e.conftest import MODEL, Server

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
UNTESTED = {("DELETE", "/v1/memory")}
"""Takes away what the others work on."""

TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
CALLED = [each for each in OPERATIONS if (each.method, each.path) not in UNTESTED]

NEGATABLE = [each for each in CALLED if each.body or each.queries]
"""Of the others every text is as described."""

MANY = [(each, GenerationMode.POSITIVE) for each in CALLED] + [
    (each, GenerationMode.NEGATIVE) for each in NEGATABLE
]

pytestmark = pytest.mark.timeout(900)


def as_of_3_2(described: Any) -> Any:
    """The document as OpenAPI 3.2 has it: there schemathesis holds each event of a stream to its description."""
    text = json.dumps({**described, "openapi": "3.2.0"})
    return json.loads(text.replace('"x-itemSchema"', '"itemSchema"'))


def check(server: Server, operation: Operation, examples: int, mode: GenerationMode) -> None:
    found = schemathesis.openapi.from_dict(as_of_3_2(document()))
    described = found[operation.path][operation.method]

    @given(case=described.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = _small(case.body)
        response = case.call(base_url=server.url, timeout=120, headers={"host": server.url.split("//")[1]})
        case.validate_response(response, checks=list(CHECKS))

    ask()


def _small(body: dict[str, Any]) -> dict[str, Any]:
    """Of a model that is there, and of few tokens: else nothing would be answered, or for ever."""
    body = {**body, **{name: 2 for name in TOKENS if isinstance(body.get(name), int) and body[name] > 2}}
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
        body.setdefault("max_output_tokens" if "input" in body else "max_tokens", 2)
    if isinstance(body.get("n"), int) and body["n"] > 2:
        body["n"] = 2
    return body


def _name(operation: Operation) -> str:
    return f"{operation.method} {operation.path}"


@pytest.mark.parametrize("operation", CALLED, ids=_name)
def test_requests_as_described(server: Server, operation: Operation) -> None:
    check(server, operation, 2, GenerationMode.POSITIVE)


@pytest.mark.parametrize("operation", NEGATABLE, ids=_name)
def test_requests_against_the_description(server: Server, operation: Operation) -> None:
    check(server, operation, 2, GenerationMode.NEGATIVE)


@pytest.mark.soak
@pytest.mark.parametrize(("operation", "mode"), MANY, ids=lambda each: getattr(each, "value", "") or _name(each))
def test_many_requests(server: Server, operation: Operation, mode: GenerationMode) -> None:
    check(server, operation, int(os.environ.get("PERILUNE_EXAMPLES", "200")), mode)
