"""`perilune batch`: a file of requests is uploaded, run by the server, and its answers are written.

Knows the wire's batch objects and files; the batch itself is the server's, and goes on without this command.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from perilune.cli.client import find_server
from perilune.cli.console import StatusLine, print_json, say, table
from perilune.config import Settings
from perilune.errors import InvalidRequest, Unreachable

if TYPE_CHECKING:
    from perilune.cli.remote import RemoteClient

T = TypeVar("T")
POLL_S = 0.5
OVER = frozenset({"completed", "failed", "expired", "cancelled"})
_MAX_ERRORS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Options:
    """Of `run` and `fetch`. `errors` None: beside the output, where there are any."""

    output: Path | None = None
    errors: Path | None = None
    endpoint: str | None = None
    window: str = "24h"
    detach: bool = False
    as_json: bool = False


def run(settings: Settings, file: Path, options: Options) -> int:
    """Returns the exit code: 0 where every line has an answer."""
    endpoint = options.endpoint or endpoint_of(file)

    async def begin(client: RemoteClient) -> dict[str, Any]:
        source = await client.upload(file, file.name, purpose="batch")
        wanted = {"input_file_id": source.file_id, "endpoint": endpoint, "completion_window": options.window}
        return await client.create_batch(wanted)

    batch = _asked(settings, begin)
    if options.detach:
        print_json(batch) if options.as_json else print(batch["id"], flush=True)
        return 0
    return fetch(settings, batch["id"], options)


def fetch(settings: Settings, batch_id: str, options: Options) -> int:
    """Wait for a batch and write its answers. Returns the exit code as `run` does."""
    try:
        batch = _asked(settings, lambda client: _until_over(client, batch_id))
    except KeyboardInterrupt:
        say(f"The batch goes on. Stop it with `perilune batch cancel {batch_id}`, or wait for it again with")
        say(f"`perilune batch fetch {batch_id}`.")
        raise
    if options.output is not None or not options.as_json:
        _asked(settings, lambda client: _write(client, batch["output_file_id"], options.output))
    if batch["error_file_id"] is not None:
        place = options.errors or _beside(options.output or Path(f"{batch_id}.jsonl"))
        _asked(settings, lambda client: _write(client, batch["error_file_id"], place))
        say(f"Lines without an answer are in {place}.")
    for error in (batch["errors"] or {"data": []})["data"][:_MAX_ERRORS_SHOWN]:
        where = f"line {error['line']}: " if error["line"] else ""
        say(f"{where}{error['message']} ({error['code']})")
    if options.as_json:
        print_json(batch)
    counts = batch["request_counts"]
    say(f"{batch['status']}: {counts['completed']:,} of {counts['total']:,} lines have an answer.")
    return 0 if batch["status"] == "completed" and batch["error_file_id"] is None else 1


def show(settings: Settings, limit: int, as_json: bool) -> None:
    """List batches, the newest first."""
    found = _asked(settings, lambda client: client.batches(limit))
    if as_json:
        print_json(found["data"])
        return
    columns = ("BATCH", "STATUS", "DONE", "FAILED", "LINES", "CREATED")
    table(columns, [_row(batch) for batch in found["data"]])


def cancel(settings: Settings, batch_id: str, as_json: bool) -> None:
    """Raises `NotFound`, and `Conflict` for a batch that has ended."""
    batch = _asked(settings, lambda client: client.cancel_batch(batch_id))
    if as_json:
        print_json(batch)
    else:
        say(f"{batch_id} is {batch['status']}.")


def endpoint_of(file: Path) -> str:
    """The url of the first request. Raises `InvalidRequest` where the file doesn't begin with one."""
    with file.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        url = json.loads(first)["url"]
    except (ValueError, KeyError, TypeError):
        url = None
    if not isinstance(url, str):
        raise InvalidRequest(
            f"The first line of {file} holds no request with a url.",
            hint='Write {"custom_id": …, "method": "POST", "url": …, "body": {…}}, one a line.',
        )
    return url


async def _until_over(client: RemoteClient, batch_id: str) -> dict[str, Any]:
    """The batch when it has ended, with a line of progress until then."""
    line = StatusLine()
    try:
        while (batch := await client.batch(batch_id))["status"] not in OVER:
            counts = batch["request_counts"]
            done = f"{counts['completed'] + counts['failed']:,} of {counts['total']:,} lines"
            failed = f", {counts['failed']:,} failed" if counts["failed"] else ""
            line.update(batch["status"], f"{done}{failed}" if counts["total"] else "")
            await asyncio.sleep(POLL_S)
        return batch
    finally:
        line.clear()


async def _write(client: RemoteClient, file_id: str | None, place: Path | None) -> None:
    """A file's bytes to a path, whole or not at all, or to stdout."""
    if place is None:
        await _copy(client, file_id, sys.stdout.buffer)
        sys.stdout.flush()
        return
    fresh = place.with_name(f"{place.name}.part")
    with fresh.open("wb") as target:
        await _copy(client, file_id, target)
    fresh.replace(place)


async def _copy(client: RemoteClient, file_id: str | None, target: BinaryIO) -> None:
    if file_id is not None:
        async for data in client.content(file_id):
            target.write(data)


def _beside(output: Path) -> Path:
    return output.with_name(f"{output.stem}.errors.jsonl")


def _row(batch: dict[str, Any]) -> tuple[object, ...]:
    counts = batch["request_counts"]
    created = time.strftime("%Y-%m-%d %H:%M", time.localtime(batch["created_at"]))
    return batch["id"], batch["status"], counts["completed"], counts["failed"], counts["total"], created


def _asked(settings: Settings, ask: Callable[[RemoteClient], Awaitable[T]]) -> T:
    """Calls to the running server. Raises `Unreachable` where none runs."""
    server = find_server(settings.home)
    if server is None:
        raise Unreachable(
            "No server of this home folder runs; batches are run by a server.", hint="Start `perilune serve`."
        )
    from perilune.cli.remote import RemoteClient

    async def asked() -> T:
        client = RemoteClient(server.url, server.model, os.environ.get("PERILUNE_API_KEY"))
        try:
            return await ask(client)
        finally:
            await client.close()

    return asyncio.run(asked())
