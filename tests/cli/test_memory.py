"""`perilune memory` and `perilune sessions` without a server; with one they run in tests/e2e/test_sessions.py."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Command


@pytest.mark.parametrize(
    "words",
    [
        ("sessions", "ls"),
        ("sessions", "show", "trip", "--json"),
        ("memory", "search", "locker"),
        ("memory", "forget", "--session", "trip"),
        ("memory", "forget", "--profile"),
        ("memory", "show", "--json"),
        ("memory", "show", "--session", "trip"),
        ("memory", "edit", "name", "Anna"),
        ("memory", "export"),
        ("sessions", "rm", "trip"),
        ("sessions", "list"),
        ("sessions", "delete", "trip"),
        ("documents", "ls"),
        ("documents", "delete", "file-1"),
        ("feedback", "export"),
        ("ps", "--json"),
    ],
)
def test_without_a_server(call: Command, words: tuple[str, ...]) -> None:
    done = call(*words)
    assert (done.code, done.out) == (3, "")
    assert "perilune serve" in done.err


def test_forget_needs_to_be_told_what(call: Command) -> None:
    assert call("memory", "forget").code == 2
    assert call("memory", "forget", "--session", "trip", "--profile").code == 2


@pytest.mark.parametrize(
    "words",
    [
        ("memory", "show", "--session", "trip", "--file", "file-1"),
        ("memory", "edit", "three", "Text.", "--session", "trip"),
    ],
)
def test_what_can_not_be_meant(call: Command, words: tuple[str, ...]) -> None:
    done = call(*words)
    assert (done.code, done.out) == (2, "")
