"""Kind of a document -> the module that parses it. Modules are loaded when a document needs them."""

from __future__ import annotations

import importlib

from perilune.memory.ingest.pagination import Parsed
from perilune.memory.ingest.sniff import kind_of
from perilune.memory.ingest.source import Source

PARSERS = {
    "pdf": "perilune.memory.ingest.pdf",
    "docx": "perilune.memory.ingest.word",
    "pptx": "perilune.memory.ingest.slides",
    "xlsx": "perilune.memory.ingest.sheets",
    "epub": "perilune.memory.ingest.book",
    "html": "perilune.memory.ingest.web",
    "image": "perilune.memory.ingest.image",
    "zip": "perilune.memory.ingest.archive",
    "text": "perilune.memory.ingest.plain",
}


def open_document(source: Source) -> Parsed:
    """Raises `UnsupportedDocument`, here and while its pages are read."""
    parsed: Parsed = importlib.import_module(PARSERS[kind_of(source)]).parse(source)
    return parsed
