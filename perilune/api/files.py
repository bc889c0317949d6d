"""/v1/files: upload, list, retrieve, delete, content. OpenAI's shapes, with the state of ingest beside.

Knows the wire; the files are the service's. `status` has OpenAI's three values, so that waiting clients work;
`perilune.status` tells the stages apart and counts pages.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from perilune.api.auth import caller_of, require_writer
from perilune.api.file_terms import FILE_EXTRACT, USUAL_PURPOSE, expiry_of_form, lasts_s, purpose_of
from perilune.api.limits import number_of
from perilune.api.upload import received
from perilune.api.wire import json_response
from perilune.core import FileRecord, FileStatus, PageView
from perilune.errors import Conflict, InvalidRequest, NotFound, UnsupportedDocument
from perilune.service.ports import ServiceApi

MAX_LIMIT = 10_000
BLOCK_BYTES = 1024**2
EXTRACT_S = 120.0
"""How long the text of a `file-extract` file is waited for."""

MIN_WIDTH, DEFAULT_WIDTH, MAX_WIDTH = 100, 1_000, 2_000
_POLL_S = 0.05
_PAGE = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_FILE_ID = re.compile(r"[A-Za-z0-9_-]{1,128}", re.ASCII)
_WIRE_STATUS = {
    FileStatus.UPLOADED: "uploaded",
    FileStatus.PARSING: "uploaded",
    FileStatus.PREFILLING: "uploaded",
    FileStatus.PROCESSED: "processed",
    FileStatus.ERROR: "error",
}


def file_dict(record: FileRecord) -> dict[str, Any]:
    """The file object."""
    return {
        "id": record.file_id,
        "object": "file",
        "bytes": record.size_bytes,
        "created_at": int(record.created_at),
        "expires_at": None if record.expires_at is None else int(record.expires_at),
        "filename": record.filename,
        "purpose": record.purpose,
        "status": _WIRE_STATUS[record.status],
        "status_details": record.error,
        "perilune": {
            "status": record.status.value,
            "error_code": record.error_code,
            "pages_total": record.pages_total,
            "pages_parsed": record.pages_parsed,
            "tokens": record.tokens,
            "language": record.language,
            "local_only": record.local_only,
            "sha256": record.sha256,
        },
    }


class Files:
    """The endpoints, as handlers of one object that holds the service and the limits."""

    def __init__(self, service: ServiceApi, max_upload_bytes: int, folder: Path) -> None:
        self._documents = service.documents
        self._max_upload_bytes = max_upload_bytes
        self._folder = folder

    async def collection(self, request: Request) -> Response:
        """POST uploads, GET lists."""
        return await (self._upload(request) if request.method == "POST" else self._list(request))

    async def item(self, request: Request) -> Response:
        """GET retrieves, DELETE deletes."""
        return await (self._delete(request) if request.method == "DELETE" else self._retrieve(request))

    async def _upload(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        require_writer(caller)
        async with received(request.scope, request.receive, self._max_upload_bytes, self._folder) as upload:
            purpose = purpose_of(upload.fields.get("purpose", USUAL_PURPOSE))
            expiry = expiry_of_form(upload.fields)
            local_only = upload.fields.get("local_only", "false")
            if local_only not in ("true", "false"):
                raise InvalidRequest("Wrong value for local_only.", hint="Use true or false.", param="local_only")
            record = await self._documents.upload(
                caller.tenant,
                upload.filename,
                purpose,
                upload.data,
                local_only == "true",
                lasts_s=lasts_s(purpose, expiry),
            )
        return json_response(file_dict(record))

    async def _list(self, request: Request) -> Response:
        records = await self._documents.list(caller_of(request.scope).tenant)
        return json_response(listing(records, request.query_params))

    async def _retrieve(self, request: Request) -> Response:
        record = await self._documents.get(caller_of(request.scope).tenant, file_id_of(request))
        return json_response(file_dict(record))

    async def _delete(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        require_writer(caller)
        file_id = file_id_of(request)
        await self._documents.delete(caller.tenant, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        """The bytes as they were uploaded, or with `?format=text` the text that was read from them; of a
        `file-extract` file the text, unless `?format=raw`."""
        tenant, file_id = caller_of(request.scope).tenant, file_id_of(request)
        record = await self._documents.get(tenant, file_id)
        form = request.query_params.get("format", "text" if record.purpose == FILE_EXTRACT else "raw")
        if form not in ("raw", "text"):
            raise InvalidRequest("Wrong value for format.", hint="Use raw or text.", param="format")
        if form == "text":
            if record.purpose == FILE_EXTRACT:
                await self._until_read(record)
            text = await self._documents.text(tenant, file_id)
            return Response(text, media_type="text/plain", headers={"x-content-type-options": "nosniff"})
        file = await self._documents.content(tenant, file_id)
        # Never shown inline: an uploaded page must not run as one of this server's own.
        headers = {
            "content-disposition": f"attachment; filename*=utf-8''{quote(record.filename, safe='')}",
            "x-content-type-options": "nosniff",
            "content-length": str(record.size_bytes),
        }
        return StreamingResponse(_blocks(file), media_type="application/octet-stream", headers=headers)

    async def _until_read(self, record: FileRecord) -> None:
        """Moonshot's clients ask for the text right after the upload. Raises `UnsupportedDocument` for what can't
        be read, `Conflict` for what isn't read in time."""
        try:
            async with asyncio.timeout(EXTRACT_S):
                while record.status in (FileStatus.UPLOADED, FileStatus.PARSING):
                    await asyncio.sleep(_POLL_S)
                    record = await self._documents.get(record.tenant, record.file_id)
        except TimeoutError:
            raise Conflict(
                "The file is still being read.", hint="Ask again when its status is processed.", param="file_id"
            ) from None
        if record.status is FileStatus.ERROR:
            raise UnsupportedDocument(
                f"{record.filename} can't be read: {record.error}", hint="Upload a readable version."
            )

    async def page(self, request: Request) -> Response:
        """The text of a page, and where it lies in the whole text that citations count in."""
        file_id, number = file_id_of(request), page_of(request)
        view = await self._documents.page(caller_of(request.scope).tenant, file_id, number)
        return json_response(page_dict(file_id, view))

    async def page_image(self, request: Request) -> Response:
        """A page as a PNG; `?width=` in pixels. Not for browsers' caches: a deleted file is gone."""
        file_id, number = file_id_of(request), page_of(request)
        width = number_of(request.query_params, "width", DEFAULT_WIDTH, MIN_WIDTH, MAX_WIDTH)
        png = await self._documents.page_image(caller_of(request.scope).tenant, file_id, number, width)
        headers = {"cache-control": "private, no-store", "x-content-type-options": "nosniff"}
        return Response(png, media_type="image/png", headers=headers)


async def _blocks(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    """A file in blocks, closed at the end: an upload may be larger than the memory to spare."""
    with file:
        while block := await asyncio.to_thread(file.read, BLOCK_BYTES):
            yield block


def file_id_of(request: Request) -> str:
    """The id in the path. Raises `NotFound` for one that no file can have."""
    file_id: str = request.path_params["file_id"]
    if not _FILE_ID.fullmatch(file_id):
        raise NotFound("There is no such file.", hint="GET /v1/files lists yours.", param="file_id")
    return file_id


def page_of(request: Request) -> int:
    """The page's number in the path. Raises `NotFound` for what is none."""
    number: str = request.path_params["page"]
    if not _PAGE.fullmatch(number):
        raise NotFound("There is no such page.", hint="Pages count from 1.", param="page")
    return int(number)


def page_dict(file_id: str, view: PageView) -> dict[str, Any]:
    """A page; `start` and `end` count characters of the file's whole text, as citations do."""
    page = view.page
    return {
        "object": "file.page",
        "file_id": file_id,
        "filename": view.filename,
        "page": page.number,
        "pages": view.pages,
        "anchor": page.anchor,
        "start": page.start,
        "end": page.end,
        "text": page.text,
        "image": view.drawable,
    }


def listing(records: Iterable[FileRecord], query: Mapping[str, str]) -> dict[str, Any]:
    """One page of files, by OpenAI's `purpose`, `order`, `after` and `limit`."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("Wrong value for order.", hint="Use asc or desc.", param="order")
    limit = number_of(query, "limit", MAX_LIMIT, 1, MAX_LIMIT)
    purpose = query.get("purpose")
    chosen = [record for record in records if purpose in (None, record.purpose)]
    chosen.sort(key=lambda record: (record.created_at, record.file_id), reverse=order == "desc")
    ids = [record.file_id for record in chosen]
    after = query.get("after")
    if after is not None and after not in ids:
        raise InvalidRequest("No file has the id in after.", hint="Use last_id of a page.", param="after")
    start = ids.index(after) + 1 if after is not None else 0
    page = chosen[start : start + limit]
    return {
        "object": "list",
        "data": [file_dict(record) for record in page],
        "first_id": page[0].file_id if page else None,
        "last_id": page[-1].file_id if page else None,
        "has_more": start + limit < len(chosen),
    }
