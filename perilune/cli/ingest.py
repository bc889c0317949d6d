"""`perilune ingest FILE...`: read documents ahead of questions. A line for each on stdout, the rest on stderr."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perilune.cli.client import Client, connect
from perilune.cli.console import StatusLine, print_json, say
from perilune.cli.documents import (
    Documents,
    Source,
    delete_earlier,
    discard,
    read_sources,
    upload,
    wait_for_all,
)
from perilune.config import Settings
from perilune.core import FileRecord, FileStatus
from perilune.errors import UnsupportedDocument


@dataclass(frozen=True, slots=True)
class Options:
    wait: bool = False
    replace: bool = False
    as_json: bool = False
    local_only: bool = False


def run(settings: Settings, paths: Sequence[Path], options: Options, model_given: bool) -> None:
    """Ingest and return. Raises `UnsupportedDocument` at the end where a document can't be read."""
    sources = read_sources(paths)
    try:
        asyncio.run(_run(settings, sources, options, model_given))
    finally:
        discard(sources)


async def _run(settings: Settings, sources: Sequence[Source], options: Options, model_given: bool) -> None:
    status = StatusLine(quiet=options.as_json)
    status.update("loading", settings.model.path)
    client: Client = await connect(settings, model_given)
    try:
        documents: Documents = await upload(client, sources, status, options.local_only)
        await wait_for_all(client, documents, status, until_finished=options.wait)
        replaced = await delete_earlier(client, documents) if options.replace else 0
    finally:
        status.clear()
        await client.close()
    records = list(documents.records.values())
    if options.as_json:
        print_json({"files": [_json(record) for record in records]})
    else:
        for record in records:
            print(_line(record))
        if replaced:
            say(f"earlier versions deleted: {replaced}")
        if client.in_process and not documents.finished:
            say("searchable; KV is computed when Perilune runs next (--wait computes it now)")
    failed = [record.filename for record in records if record.status is FileStatus.ERROR]
    if failed:
        raise UnsupportedDocument(
            f"{len(failed)} of {len(records)} documents can't be used: {', '.join(failed[:10])}.",
            hint="Their lines say why; docs/documents.md lists what can be read.",
        )


def _line(record: FileRecord) -> str:
    if record.status is FileStatus.ERROR:
        return f"{record.filename}: {record.error or 'it could not be read.'}"
    language = f", {record.language}" if record.language else ""
    return f"{record.filename}: {record.pages_parsed:,} pages{language}, {record.file_id}"


def _json(record: FileRecord) -> dict[str, object]:
    return {
        "id": record.file_id,
        "filename": record.filename,
        "status": record.status.value,
        "pages": record.pages_parsed,
        "language": record.language,
        "error": record.error,
    }
