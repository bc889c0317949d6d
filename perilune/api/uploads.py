"""/v1/uploads: files that arrive in parts (OpenAI's Uploads). The file that they make is one of /v1/files.

Knows the wire; parts and files are the service's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from perilune.api.auth import caller_of, require_writer
from perilune.api.file_terms import WireExpiry, lasts_s, purpose_of
from perilune.api.files import file_dict
from perilune.api.limits import parse_json_object, read_body
from perilune.api.schema import wrong_field
from perilune.api.upload import clean_filename, received
from perilune.api.wire import Wire, json_response
from perilune.core import FileRecord
from perilune.memory.uploads import MAX_PART_BYTES, UploadRecord
from perilune.service.ports import ServiceApi

MAX_PARTS = 10_000
_MAX_BODY_BYTES = 1024**2


class WireUpload(Wire):
    """The body of POST /v1/uploads."""

    filename: str = Field(min_length=1, max_length=1024)
    bytes: int = Field(ge=1, le=2**53)
    mime_type: str = Field(max_length=256)
    purpose: str = Field(max_length=64)
    expires_after: WireExpiry | None = None


class WireComplete(Wire):
    """The body of POST /v1/uploads/{upload_id}/complete."""

    part_ids: Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=MAX_PARTS)]
    md5: str | None = Field(None, pattern=r"^[0-9a-fA-F]{32}$")


def upload_dict(upload: UploadRecord, file: FileRecord | None = None) -> dict[str, Any]:
    """The upload object."""
    return {
        "id": upload.upload_id,
        "object": "upload",
        "bytes": upload.size_bytes,
        "created_at": int(upload.created_at),
        "expires_at": int(upload.expires_at),
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": upload.status,
        "file": None if file is None else file_dict(file),
    }


class Uploads:
    """The endpoints, as handlers of one object that holds the service."""

    def __init__(self, service: ServiceApi, folder: Path) -> None:
        self._uploads = service.uploads
        self._folder = folder

    async def create(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        require_writer(caller)
        body = parse_json_object(await read_body(request.scope, request.receive, _MAX_BODY_BYTES))
        try:
            wire = WireUpload.model_validate(body)
        except ValidationError as error:
            raise wrong_field(error) from None
        purpose = purpose_of(wire.purpose)
        keep_s = lasts_s(purpose, wire.expires_after)
        upload = await self._uploads.create(
            caller.tenant, clean_filename(wire.filename), purpose, wire.bytes, keep_s
        )
        return json_response(upload_dict(upload))

    async def add_part(self, request: Request) -> Response:
        caller, upload_id = caller_of(request.scope), request.path_params["upload_id"]
        require_writer(caller)
        async with received(request.scope, request.receive, MAX_PART_BYTES, self._folder, "data") as form:
            part = await self._uploads.add_part(caller.tenant, upload_id, form.data)
        return json_response(
            {
                "id": part.part_id,
                "object": "upload.part",
                "created_at": int(part.created_at),
                "upload_id": part.upload_id,
            }
        )

    async def complete(self, request: Request) -> Response:
        caller, upload_id = caller_of(request.scope), request.path_params["upload_id"]
        require_writer(caller)
        body = parse_json_object(await read_body(request.scope, request.receive, _MAX_BODY_BYTES))
        try:
            wire = WireComplete.model_validate(body)
        except ValidationError as error:
            raise wrong_field(error) from None
        upload, file = await self._uploads.complete(caller.tenant, upload_id, wire.part_ids, wire.md5)
        return json_response(upload_dict(upload, file))

    async def cancel(self, request: Request) -> Response:
        caller, upload_id = caller_of(request.scope), request.path_params["upload_id"]
        require_writer(caller)
        return json_response(upload_dict(await self._uploads.cancel(caller.tenant, upload_id)))
