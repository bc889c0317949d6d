"""`perilune models`: what is installed and what can be pulled."""

from __future__ import annotations

from perilune.cli.console import print_json, say, table
from perilune.cli.pull import describe
from perilune.config import Settings
from perilune.runtime.hub.catalogue import ModelEntry, load_catalogue
from perilune.runtime.hub.pull import installed, remove
from perilune.runtime.memory import human_bytes

_COLUMNS = ("NAME", "STATE", "SIZE", "WINDOW", "KIND", "LANGUAGES", "LICENCE")


def show(settings: Settings, as_json: bool) -> None:
    """List models on stdout: installed ones first, then the catalogue's."""
    present = installed(settings.home)
    names = {files.card.name for files in present}
    catalogue = load_catalogue()
    available = [entry for entry in catalogue.models if entry.name not in names]
    if as_json:
        known = [{"name": entry.name, "size_bytes": entry.size_bytes} | _facts(entry) for entry in available]
        print_json({"installed": [describe(files) for files in present], "available": known})
        return
    rows = [_row(files.card, "installed", files.size_bytes) for files in present]
    rows += [_row(entry, "available", entry.size_bytes) for entry in available]
    table(_COLUMNS, rows)
    if not present:
        say(f"None is installed. Run `perilune pull {catalogue.default}`.")


def delete(settings: Settings, name: str, as_json: bool) -> None:
    """Remove an installed model and say what that freed."""
    freed = remove(name, settings.home)
    if as_json:
        print_json({"deleted": name, "freed_bytes": freed})
    else:
        say(f"Freed {human_bytes(freed)}.")


def _facts(entry: ModelEntry) -> dict[str, object]:
    return {
        "window_tokens": entry.window_tokens,
        "licence": entry.licence,
        "languages": list(entry.languages),
        "kind": entry.kind,
        "sources": [source.label for source in entry.sources],
    }


def _row(entry: ModelEntry, state: str, size_bytes: int | None) -> tuple[str, ...]:
    window = f"{entry.window_tokens:,}" if entry.window_tokens else "?"
    languages = list(entry.languages)
    spoken = ",".join(languages[:3]) + (f" +{len(languages) - 3}" if len(languages) > 3 else "")
    return (entry.name, state, human_bytes(size_bytes), window, entry.kind, spoken or "?", entry.licence)
