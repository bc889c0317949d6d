"""`perilune memory` and `perilune sessions`: what the running server keeps of conversations."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from perilune.cli.client import find_server
from perilune.cli.console import print_json, say, table
from perilune.config import Settings
from perilune.errors import Unreachable

if TYPE_CHECKING:
    from perilune.cli.remote import RemoteClient

T = TypeVar("T")
_SHOWN_CHARS = 100


def search(settings: Settings, query: str, session_ids: Sequence[str], limit: int, as_json: bool) -> None:
    """Print what is found, best first. Raises `NotFound` for a session that isn't there."""
    found = _asked(settings, lambda client: client.search_memory(query, session_ids, limit))["data"]
    if as_json:
        print_json({"hits": found})
    elif not found:
        say("Nothing was found.")
    else:
        table(("WHERE", "WHO", "WHEN", "TEXT"), [_row(hit) for hit in found])


def forget(settings: Settings, session_id: str) -> None:
    """Delete a session everywhere. Raises `NotFound`."""
    _asked(settings, lambda client: client.forget_session(session_id))
    say(f"{session_id} is forgotten.")


def show_sessions(settings: Settings, limit: int, as_json: bool) -> None:
    """List sessions, the one with the newest turn first."""
    found = _asked(settings, lambda client: client.sessions(limit))
    if as_json:
        print_json({"sessions": found["data"], "has_more": found["has_more"]})
        return
    rows = [
        (each["id"], each["turns"], _when(each["created_at"]), _when(each["last_at"])) for each in found["data"]
    ]
    if rows:
        table(("SESSION", "TURNS", "FIRST", "LAST"), rows)
    else:
        say("No sessions are kept.")
    if found["has_more"]:
        say("There are more; --limit shows them.")


def show_session(settings: Settings, session_id: str, after: int, limit: int, as_json: bool) -> None:
    """Print a session's turns in order. Raises `NotFound`."""
    found = _asked(settings, lambda client: client.session(session_id, after, limit))
    if as_json:
        print_json(found)
        return
    for turn in found["data"]:
        print(f"[{turn['turn']}] {turn['speaker']}, {_when(turn['at'])}\n{turn['text']}\n")
    if found["has_more"]:
        say(f"There are more; --after {found['data'][-1]['turn']} shows them.")


def _asked(settings: Settings, ask: Callable[[RemoteClient], Awaitable[T]]) -> T:
    """One call to the running server. Raises `Unreachable` where none runs."""
    server = find_server(settings.home)
    if server is None:
        raise Unreachable(
            "No server of this home folder runs; sessions are kept by a server.", hint="Start `perilune serve`."
        )
    from perilune.cli.remote import RemoteClient

    async def asked() -> T:
        client = RemoteClient(server.url, server.model, os.environ.get("PERILUNE_API_KEY"))
        try:
            return await ask(client)
        finally:
            await client.close()

    return asyncio.run(asked())


def _row(hit: dict[str, Any]) -> tuple[str, str, str, str]:
    text = " ".join(hit["text"].split())
    shown = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
    if "turn" in hit:
        return f"{hit['session']}, turn {hit['turn']}", hit["speaker"], _when(hit["at"]), shown
    return f"{hit['file_id']}, p. {hit['page']}", "-", "-", shown


def _when(at: float | None) -> str:
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
