"""`perilune pull`: fetch a model and prepare what is derived from it once."""

from __future__ import annotations

from pathlib import Path

from perilune.cli.console import print_json, pull_display, say
from perilune.config import Settings
from perilune.runtime.hub.catalogue import load_catalogue
from perilune.runtime.hub.pull import ModelFiles, pull
from perilune.runtime.memory import human_bytes


def run(settings: Settings, name: str | None, source: str | None, as_json: bool) -> None:
    """Fetch `name`, or the default model, showing progress on stderr and the result on stdout."""
    chosen = name or load_catalogue().default
    with pull_display() as display:
        files = pull(chosen, settings.home, display, source=source, finish=prepare)
    if as_json:
        print_json(describe(files))
        return
    print(files.path)
    if files.card.kind == "base":
        say(f"note: {files.card.name} is a base model: it continues text and has no chat template.")


def prepare(path: Path) -> None:
    """Make what loading would otherwise make at the first question: the tokenizer's own form."""
    from perilune.runtime.tokenizer_gguf import convert_tokenizer

    convert_tokenizer(path)


def describe(files: ModelFiles) -> dict[str, object]:
    """An installed model as JSON."""
    card = files.card
    return {
        "name": card.name,
        "path": str(files.path),
        "size_bytes": files.size_bytes,
        "size": human_bytes(files.size_bytes),
        "sha256": card.sha256,
        "verified": files.verified,
        "source": files.source,
        "window_tokens": card.window_tokens,
        "licence": card.licence,
        "languages": list(card.languages),
        "kind": card.kind,
    }
