"""`perilune documents`, `feedback export` and `ps`: what the running server is and keeps, outside conversations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perilune.cli.client import find_server
from perilune.cli.console import print_json, say, table
from perilune.cli.memory import asked, save
from perilune.config import Settings
from perilune.errors import Unreachable
from perilune.runtime.memory import human_bytes


def show_documents(settings: Settings, as_json: bool) -> None:
    """Print documents with their state."""
    found = asked(settings, lambda client: client.files())
    if as_json:
        fields = ("file_id", "filename", "status", "size_bytes", "pages_parsed", "language", "error")
        print_json({"documents": [{name: getattr(each, name) for name in fields} for each in found]})
    elif found:
        rows = [(f.file_id, f.status.value, human_bytes(f.size_bytes), f.pages_parsed, f.filename) for f in found]
        table(("ID", "STATE", "SIZE", "PAGES", "NAME"), rows)
    else:
        say("There are no documents.")


def delete_documents(settings: Settings, file_ids: Sequence[str], as_json: bool) -> None:
    """Delete them in this order. Raises `NotFound` at the first that isn't there."""
    for file_id in file_ids:
        asked(settings, lambda client, file_id=file_id: client.delete(file_id))  # type: ignore[misc]
        if not as_json:
            say(f"{file_id} is deleted.")
    if as_json:
        print_json({"deleted": list(file_ids)})


def export_feedback(settings: Settings, output: Path | None) -> None:
    """Write ratings as JSON Lines. A broken transfer leaves no file."""
    save(settings, output, lambda client: client.export_feedback())


def show_server(settings: Settings, as_json: bool) -> None:
    """Raises `Unreachable` where no server of this home folder runs."""
    server = find_server(settings.home)
    if server is None:
        raise Unreachable("No server of this home folder runs.", hint="Start `perilune serve`.")
    if as_json:
        print_json({"url": server.url, "pid": server.pid, "model": server.model})
    else:
        table(("MODEL", "ADDRESS", "PROCESS"), [(server.model, f"{server.url}/v1", server.pid)])
