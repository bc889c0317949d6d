"""Files in parts by OpenAI's client, and what files are for and how long they stay."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from perilune.core import FileStatus
from perilune.service.ports import Caller

from .conftest import Serve, Server, eventually
from .fakes import FakeService
from .stored import MAX_BYTES, Stored, stored_service
from .test_files import FORM, multipart


@asynccontextmanager
async def running(
    serve: Serve, home: Path, service: FakeService | None = None, key: str = "any"
) -> AsyncIterator[tuple[Server, Stored]]:
    service = service or FakeService()
    async with stored_service(home, service, [time.time()]) as stored, serve(service, key) as server:
        yield server, stored


async def created(server: Server, size: int, **more: Any) -> Any:
    wanted: dict[str, Any] = {"filename": "a.txt", "mime_type": "text/plain", "purpose": "user_data", **more}
    return await server.client.uploads.create(bytes=size, **wanted)


async def test_a_file_in_parts_by_the_clients_own_means(serve: Serve, tmp_path: Path) -> None:
    data = os.urandom(2_500_000)
    path = tmp_path / "big.bin"
    path.write_bytes(data)
    async with running(serve, tmp_path) as (server, _):
        upload = await server.client.uploads.upload_file_chunked(
            file=path,
            mime_type="application/octet-stream",
            purpose="assistants",
            part_size=1_000_000,
            md5=hashlib.md5(data).hexdigest(),
        )
        assert (upload.object, upload.status, upload.bytes) == ("upload", "completed", len(data))
        assert upload.file is not None
        assert (upload.file.filename, upload.file.purpose) == ("big.bin", "assistants")
        assert (await server.client.files.content(upload.file.id)).content == data


async def test_completing_again_answers_the_same(serve: Serve, tmp_path: Path) -> None:
    async with running(serve, tmp_path) as (server, stored):
        uploads = server.client.uploads
        upload = await created(server, 6, expires_after={"anchor": "created_at", "seconds": 3600})
        assert (upload.status, upload.file, upload.expires_at - upload.created_at) == ("pending", None, 3600)
        second = await uploads.parts.create(upload.id, data=b"def")
        first = await uploads.parts.create(upload.id, data=b"abc")
        assert (first.object, first.upload_id) == ("upload.part", upload.id)
        done = await uploads.complete(upload.id, part_ids=[first.id, second.id])
        again = await uploads.complete(upload.id, part_ids=[first.id, second.id])
        assert done.file is not None
        assert again.file is not None
        assert done.file.id == again.file.id
        assert done.file.expires_at == done.file.created_at + 3600
        assert (await server.client.files.content(done.file.id)).content == b"abcdef"
        assert len(stored.library.list_files("local")) == 1
        for call in (uploads.parts.create(upload.id, data=b"x"), uploads.cancel(upload.id)):
            with pytest.raises(openai.ConflictError):
                await call


async def test_what_is_wrong_with_an_upload(serve: Serve, tmp_path: Path) -> None:
    async with running(serve, tmp_path) as (server, stored):
        uploads = server.client.uploads
        upload = await created(server, 6)
        part = await uploads.parts.create(upload.id, data=b"abc")
        with pytest.raises(openai.BadRequestError, match="3 bytes, and 6"):
            await uploads.complete(upload.id, part_ids=[part.id])
        more = await uploads.parts.create(upload.id, data=b"def")
        for wrong in ([part.id, part.id], [part.id, "part_x"]):
            with pytest.raises(openai.BadRequestError):
                await uploads.complete(upload.id, part_ids=wrong)
        with pytest.raises(openai.BadRequestError, match="md5"):
            await uploads.complete(upload.id, part_ids=[part.id, more.id], md5="0" * 32)
        with pytest.raises(openai.BadRequestError):
            await uploads.complete(upload.id, part_ids=[part.id, more.id], md5="not hexadecimal")
        with pytest.raises(openai.APIStatusError) as large:
            await uploads.parts.create(upload.id, data=b"x" * 13)
        assert large.value.status_code == 413
        with pytest.raises(openai.APIStatusError) as large:
            await created(server, MAX_BYTES + 1)
        assert large.value.status_code == 413
        for change in ({"purpose": "fine-tune"}, {"filename": ""}, {"bytes": 0}, {"bytes": "6"}):
            body = {"filename": "a", "bytes": 1, "mime_type": "", "purpose": "user_data", **change}
            assert (await server.http.post("/v1/uploads", json=body)).status == 400
        path = f"/v1/uploads/{upload.id}/parts"
        data = ('name="data"; filename="upload"', b"abc")
        for form in (multipart(data, end=False), multipart(('name="file"; filename="a"', b"abc")), multipart()):
            assert (await server.http.post(path, data=form, headers=FORM)).status == 400
        assert (await uploads.cancel(upload.id)).status == "cancelled"
        assert (await uploads.cancel(upload.id)).status == "cancelled"
        with pytest.raises(openai.ConflictError):
            await uploads.complete(upload.id, part_ids=[part.id, more.id])
        with pytest.raises(openai.NotFoundError):
            await uploads.cancel("upload_none")
        assert stored.library.list_files("local") == []
        assert not list(tmp_path.glob("files/*/part_*"))


async def test_a_part_cut_by_the_client_is_no_part(serve: Serve, tmp_path: Path) -> None:
    """Nothing of it stays, and the part can be sent again."""
    async with running(serve, tmp_path) as (server, _):
        data = os.urandom(2_500_000)
        upload = await created(server, len(data))
        body = multipart(('name="data"; filename="upload"', data))
        path = f"/v1/uploads/{upload.id}/parts"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM['content-type']}\r\n"
        _, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:2_000_000])
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await eventually(lambda: 'parts",status="499"' in server.shown_metrics())
        assert not list(tmp_path.glob("files/*/part_*"))
        part = await server.client.uploads.parts.create(upload.id, data=data)
        assert len(list(tmp_path.glob("files/*/part_*"))) == 1
        done = await server.client.uploads.complete(upload.id, part_ids=[part.id])
        assert done.file is not None
        assert (await server.client.files.content(done.file.id)).content == data


async def test_other_tenants_uploads_are_not_found(serve: Serve, tmp_path: Path) -> None:
    keys = {"mine": Caller("mine", "user"), "other": Caller("other", "user"), "reader": Caller("mine", "read-only")}
    async with running(serve, tmp_path, FakeService(keys=keys), "mine") as (server, _):
        upload = await created(server, 3)
        part = await server.client.uploads.parts.create(upload.id, data=b"abc")
        other = server.client.with_options(api_key="other").uploads
        for call in (
            other.parts.create(upload.id, data=b"x"),
            other.complete(upload.id, part_ids=[part.id]),
            other.cancel(upload.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.PermissionDeniedError):
            await server.client.with_options(api_key="reader").uploads.cancel(upload.id)


async def test_purposes(serve: Serve, tmp_path: Path) -> None:
    async with running(serve, tmp_path) as (server, stored):
        for purpose, status in (
            ("user_data", FileStatus.UPLOADED),
            ("vision", FileStatus.UPLOADED),
            ("image", FileStatus.UPLOADED),
            ("file-extract", FileStatus.UPLOADED),
            ("batch", FileStatus.PROCESSED),
        ):
            file = await server.client.files.create(file=("a", b"text"), purpose=purpose)  # type: ignore[arg-type]
            assert stored.library.get_file("local", file.id).status is status, purpose
        for purpose in ("fine-tune", "evals", "video", "batch_output", "nonsense"):
            with pytest.raises(openai.BadRequestError) as refused:
                await server.client.files.create(file=("a", b"text"), purpose=purpose)  # type: ignore[arg-type]
            assert refused.value.param == "purpose"
        assert len([each async for each in server.client.files.list(purpose="batch")]) == 1


async def test_the_same_file_twice_is_two_files(serve: Serve, tmp_path: Path) -> None:
    async with running(serve, tmp_path) as (server, _):
        files = [await server.client.files.create(file=("a", b"text"), purpose="batch") for _ in range(2)]
        assert files[0].id != files[1].id
        await server.client.files.delete(files[0].id)
        assert (await server.client.files.content(files[1].id)).content == b"text"


async def test_a_files_own_time(serve: Serve, tmp_path: Path) -> None:
    async with running(serve, tmp_path) as (server, stored):
        expiry: Any = {"anchor": "created_at", "seconds": 3600}
        file = await server.client.files.create(file=("a", b"x"), purpose="user_data", expires_after=expiry)
        assert file.expires_at == file.created_at + 3600
        stays = await server.client.files.create(file=("a", b"x"), purpose="user_data")
        assert stays.expires_at is None
        stored.now[0] += 3_601
        with pytest.raises(openai.NotFoundError):
            await server.client.files.retrieve(file.id)
        assert [each.id async for each in server.client.files.list()] == [stays.id]
        for wrong in ({"anchor": "created_at", "seconds": 60}, {"anchor": "never", "seconds": 3600}):
            with pytest.raises(openai.BadRequestError):
                await server.client.files.create(file=("a", b"x"), purpose="user_data", expires_after=wrong)  # type: ignore[arg-type]


async def test_the_content_of_file_extract_is_its_text(serve: Serve, tmp_path: Path) -> None:
    async with running(serve, tmp_path) as (server, stored):
        page = b"<html><body><p>The far side.</p></body></html>"
        file = await server.client.files.create(file=("a.html", page), purpose="file-extract")  # type: ignore[arg-type]
        for _ in stored.library.parse("local", file.id):
            pass
        assert (await server.client.files.content(file.id)).text.strip() == "The far side."
        raw = await server.http.get(f"/v1/files/{file.id}/content?format=raw")
        assert await raw.read() == page
        damaged = await server.client.files.create(file=("a.pdf", b"%PDF-1.7 damaged"), purpose="file-extract")  # type: ignore[arg-type]
        for _ in stored.library.parse("local", damaged.id):
            pass
        with pytest.raises(openai.UnprocessableEntityError):
            await server.client.files.content(damaged.id)


async def test_batch_files_are_no_documents(serve: Serve, tmp_path: Path) -> None:
    """The service refuses them as documents (tests/service/test_documents.py); here: their bytes come back."""
    async with running(serve, tmp_path) as (server, _):
        data = json.dumps({"custom_id": "a"}).encode()
        file = await server.client.files.create(file=("in.jsonl", data), purpose="batch")
        assert file.status == "processed"
        assert (await server.client.files.content(file.id)).content == data
