"""`perilune memory` and `perilune sessions`: what the running server keeps of conversations, and knows of the
user."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from perilune.cli.client import find_server
from perilune.cli.console import print_json, say, table
from perilune.config import Settings
from perilune.errors import ConfigError, InvalidRequest, Unreachable

if TYPE_CHECKING:
    from perilune.cli.remote import RemoteClient

T = TypeVar("T")
SESSION_FORMS = ("markdown", "json")
_SHOWN_CHARS = 100


def search(
    settings: Settings,
    query: str,
    session_ids: Sequence[str],
    limit: int,
    times: tuple[str | None, str | None],
    as_json: bool,
) -> None:
    """Print what is found: the set of evidence in order of time, where the question needs one, then hits, best
    first. Raises `NotFound` for a session that isn't there."""
    found = asked(settings, lambda client: client.search_memory(query, session_ids, limit, *times))
    hits, evidence = found["data"], found["evidence"]
    if as_json:
        print_json({"hits": hits, **{key: value for key, value in found.items() if key not in ("object", "data")}})
        return
    for heading, part in ((f"In order of time ({found['kind']}):", evidence), ("Best hits:", hits)):
        if part:
            if evidence:
                say(heading)
            table(("WHERE", "WHO", "WHEN", "TEXT"), [_row(hit) for hit in part])
    if not hits:
        say("Nothing was found.")
    elif found["confidence"] is not None:
        say(f"Confidence that the best hits hold it: {found['confidence']:.0%}.")
    for fault in found["missing"]:
        say(fault)


def forget(settings: Settings, session_id: str, as_json: bool) -> None:
    """Delete a session everywhere. Raises `NotFound`."""
    asked(settings, lambda client: client.forget_session(session_id))
    if as_json:
        print_json({"session": session_id, "deleted": True})
    else:
        say(f"{session_id} is forgotten.")


def forget_profile(settings: Settings, key: str | None, as_json: bool) -> None:
    """Erase a key of the profile, or all of it. Raises `NotFound`."""
    gone = asked(settings, lambda client: client.erase_profile(key))["statements"]
    if as_json:
        print_json({"key": key, "deleted": True, "statements": gone})
    else:
        say(f"{'The profile' if key is None else key} is forgotten ({gone} statements).")


def forget_everything(settings: Settings, as_json: bool) -> None:
    """Delete all that is kept of the caller: files, sessions, profile, kept responses, their KV."""
    asked(settings, lambda client: client.forget_everything())
    if as_json:
        print_json({"everything": True, "deleted": True})
    else:
        say("Everything that was kept of you is forgotten.")


def show_profile(settings: Settings, history: bool, as_json: bool) -> None:
    """Print what is known about the user, with where and when it was said."""
    _print_profile(asked(settings, lambda client: client.profile(history)), history, as_json)


def edit_profile(settings: Settings, key: str, value: str, as_json: bool) -> None:
    """Set a key by hand. Raises `InvalidRequest`."""
    _print_profile(asked(settings, lambda client: client.edit_profile({key: value})), False, as_json)


def _print_profile(found: dict[str, Any], history: bool, as_json: bool) -> None:
    if as_json:
        print_json({"facts": found["data"]})
        return
    rows = [
        (
            fact["key"],
            fact["value"],
            _day(fact["since"]),
            *((_day(fact["until"]),) if history else ()),
            "by hand" if fact["session"] is None else f"{fact['session']}, turn {fact['turn']}",
        )
        for fact in found["data"]
    ]
    if rows:
        table(("KEY", "VALUE", "SINCE", *(("UNTIL",) if history else ()), "WHERE"), rows)
    else:
        say("Nothing is known about you.")


def source_of(session: str | None, file: str | None) -> dict[str, str]:
    """A summary's source, as the API names it. Raises `InvalidRequest` where both are named."""
    if session is not None and file is not None:
        raise InvalidRequest("Name --session or --file, not both.")
    return {"session": session} if session is not None else {"file_id": file or ""}


def show_summary(settings: Settings, source: dict[str, str], as_json: bool) -> None:
    """Print the rolling summary of a session or file. Raises `NotFound`."""
    _print_summary(asked(settings, lambda client: client.summary(source)), as_json)


def correct(settings: Settings, source: dict[str, str], place: str, text: str, as_json: bool) -> None:
    """Correct the sentence at `place` (TURN:START or PAGE:START). Raises `NotFound`, `InvalidRequest`."""
    number, _, start = place.partition(":")
    if not (number.isdecimal() and start.isdecimal()):
        raise InvalidRequest(
            f"{place} is no place.", hint="`perilune memory show` prints places before sentences, such as 3:0."
        )
    name = "turn" if "session" in source else "page"
    correction = {**source, name: int(number), "start": int(start), "text": text}
    _print_summary(asked(settings, lambda client: client.correct_summary(correction)), as_json)


def _print_summary(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json({"sentences": found["data"]})
        return
    rows = [
        (
            f"{each.get('turn', each.get('page'))}:{each['start']}",
            each.get("speaker") or "-",
            each["text"] + (" (corrected)" if each["corrected"] else ""),
        )
        for each in found["data"]
    ]
    if rows:
        table(("PLACE", "WHO", "SENTENCE"), rows)
    else:
        say("Nothing in it is worth a summary yet.")


def export(settings: Settings, output: Path | None) -> None:
    """Write everything kept about the user, as JSON Lines. A broken transfer leaves no file."""
    save(settings, output, lambda client: client.export_memory())


def export_session(settings: Settings, session_id: str, form: str, output: Path | None) -> None:
    """Write a session as `markdown` or `json`. Raises `NotFound`; a broken transfer leaves no file."""
    if form not in SESSION_FORMS:
        raise InvalidRequest(f"Unknown format {form!r}.", hint=f"Use {' or '.join(SESSION_FORMS)}.")
    save(settings, output, lambda client: client.export_session(session_id, form))


def save(settings: Settings, output: Path | None, pieces: Callable[[RemoteClient], AsyncIterator[bytes]]) -> None:
    """Write what the server sends to a file, whole or not at all, or to stdout."""

    async def fetch(client: RemoteClient, write: Callable[[bytes], object]) -> None:
        async for data in pieces(client):
            write(data)

    if output is None:
        asked(settings, lambda client: fetch(client, sys.stdout.buffer.write))
        sys.stdout.buffer.flush()
        return
    partial = output.with_name(f".{output.name}.part")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as target:
            asked(settings, lambda client: fetch(client, target.write))
        partial.replace(output)
    except OSError as error:
        raise ConfigError(f"{output} can't be written: {error.strerror}.", hint="Choose another file.") from None
    finally:
        partial.unlink(missing_ok=True)
    say(f"{output} is written.")


def show_sessions(settings: Settings, limit: int, as_json: bool) -> None:
    """List sessions, the one with the newest turn first."""
    found = asked(settings, lambda client: client.sessions(limit))
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
    found = asked(settings, lambda client: client.session(session_id, after, limit))
    if as_json:
        print_json(found)
        return
    for turn in found["data"]:
        print(f"[{turn['turn']}] {turn['speaker']}, {_when(turn['at'])}\n{turn['text']}\n")
    if found["has_more"]:
        say(f"There are more; --after {found['data'][-1]['turn']} shows them.")


def asked(settings: Settings, ask: Callable[[RemoteClient], Awaitable[T]]) -> T:
    """One call to the running server. Raises `Unreachable` where none runs."""
    server = find_server(settings.home)
    if server is None:
        raise Unreachable(
            "No server of this home folder runs; sessions are kept by a server.", hint="Start `perilune serve`."
        )
    from perilune.cli.remote import RemoteClient

    async def ask_it() -> T:
        client = RemoteClient(server.url, server.model, os.environ.get("PERILUNE_API_KEY"))
        try:
            return await ask(client)
        finally:
            await client.close()

    return asyncio.run(ask_it())


def _row(hit: dict[str, Any]) -> tuple[str, str, str, str]:
    text = " ".join(hit["text"].split())
    shown = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
    if "turn" in hit:
        return f"{hit['session']}, turn {hit['turn']}", hit["speaker"], _when(hit["at"]), shown
    return f"{hit['file_id']}, p. {hit['page']}", "-", "-", shown


def _day(at: float | None) -> str:
    return "-" if at is None else time.strftime("%Y-%m-%d", time.localtime(at))


def _when(at: float | None) -> str:
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
