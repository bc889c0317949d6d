"""`perilune batch` without a server, and the files it reads; with one it runs in tests/e2e/test_batches.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from perilune.cli.batch import endpoint_of
from perilune.errors import InvalidRequest
from tests.cli.conftest import Command

LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {}}\n'


@pytest.mark.parametrize("words", [("list",), ("list", "--json"), ("cancel", "batch_1"), ("fetch", "batch_1")])
def test_without_a_server(call: Command, words: tuple[str, ...]) -> None:
    done = call("batch", *words)
    assert (done.code, done.out) == (3, "")
    assert "perilune serve" in done.err


def test_run_reads_the_file_first(call: Command, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    assert call("batch", "run", str(file)).code == 2
    file.write_text("\n" + LINE)
    assert call("batch", "run", str(file)).code == 3
    assert call("batch", "run", str(file), "--detach", "-o", "out.jsonl").code == 2


def test_the_endpoint_is_the_first_lines(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("\n \n" + LINE)
    assert endpoint_of(file) == "/v1/responses"
    for wrong in ("", "[1]", "{", '{"url": 7}', "\n", '{"custom_id": "a"}'):
        file.write_text(wrong)
        with pytest.raises(InvalidRequest, match="first line"):
            endpoint_of(file)
