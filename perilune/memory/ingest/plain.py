"""Plain text, Markdown and source code -> pages. The joined pages are the decoded file."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from perilune.memory.ingest.encoding import read_text
from perilune.memory.ingest.pagination import Parsed, paginate
from perilune.memory.ingest.protocol import Job


def parse(job: Job) -> Parsed:
    """Raises `UnsupportedDocument` for binary data."""
    return Parsed(None, islice(paginate(read_text(Path(job.path))), job.first_page - 1, None))
