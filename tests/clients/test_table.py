"""The table of docs/clients.md says of each client what the matrix tests, and no more."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.clients import test_matrix as matrix
from tests.clients.conftest import SECTIONS
from tests.docs.pages import ROOT

ROWS = {name: client for client, name in SECTIONS.items()}
"""Their names in the tests; the others are called the same."""

COLUMNS: dict[str, Callable[..., None]] = {
    "Plain": matrix.test_plain,
    "Stream with usage": matrix.test_stream_with_usage,
    "Tools": matrix.test_tools,
    "Parallel tools": matrix.test_parallel_tools,
    "JSON Schema": matrix.test_json_schema,
    "Cancel": matrix.test_leaving_a_stream_stops_the_answer,
    "Retry on 429": matrix.test_a_429_is_waited_out,
    "Files": matrix.test_files,
    "Batches": matrix.test_batches,
}


def clients_of(test: Callable[..., None]) -> set[str]:
    (mark,) = [each for each in test.pytestmark if each.name == "parametrize"]  # type: ignore[attr-defined]
    return set(mark.args[1])


def test_the_table_says_what_is_tested() -> None:
    text = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (.+) \|$", text, re.MULTILINE)
    head, *rows = [line.split(" | ") for line in lines]
    assert head == ["Client", *COLUMNS]
    told = {ROWS.get(row[0], row[0]): row[1:] for row in rows}
    assert set(told) == set(matrix.ALL)
    for place, (column, test) in enumerate(COLUMNS.items()):
        assert {name for name, cells in told.items() if cells[place] == "yes"} == clients_of(test), column
    others = {cell for cells in told.values() for cell in cells} - {"yes"}
    assert others == {"not in this client", "not served"}
