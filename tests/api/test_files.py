"""Files over a real socket: OpenAI's client, and everything that can be wrong with an upload."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.api.upload import clean_filename

from .conftest import Serve, Server, eventually
from .fakes import FakeService


def multipart(*parts: tuple[str, bytes], end: bool = True) -> bytes:
    body = b"".join(b"--B\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (h.encode(), d) for h, d in parts)
    return body + (b"--B--\r\n" if end else b"")


FILE = ('name="file"; filename="a.txt"', b"some text")
PURPOSE = ('name="purpose"', b"user_data")
FORM = {"content-type": "multipart/form-data; boundary=B"}


async def post(server: Server, body: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    async with server.http.post("/v1/files", data=body, headers=headers or FORM) as reply:
        return reply.status, await reply.json()


async def test_pages_and_their_pictures(serve: Serve) -> None:
    async with serve() as server:
        record = await server.client.files.create(file=("a.txt", b"First page.Second page"), purpose="user_data")
        root = f"/v1/files/{record.id}/pages"
        shown = await (await server.http.get(f"{root}/2")).json()
        assert (shown["object"], shown["file_id"], shown["filename"]) == ("file.page", record.id, "a.txt")
        assert (shown["page"], shown["pages"], shown["image"]) == (2, 2, False)
        assert (shown["start"], shown["end"], shown["text"]) == (11, 22, "Second page")
        picture = await server.http.get(f"{root}/1/image?width=320")
        assert (picture.content_type, await picture.read()) == ("image/png", b"\x89PNG\r\n\x1a\n320")
        assert picture.headers["cache-control"] == "private, no-store"
        assert (await (await server.http.get(f"{root}/1/image")).read()).endswith(b"1000")
        for path in ("/3", "/0", "/-1", "/x", "/1e9", "/99999999999", "/2/image", "/1/image/x"):
            assert (await server.http.get(root + path)).status == 404, path
        for width in ("0", "99", "2001", "x"):
            assert (await server.http.get(f"{root}/1/image?width={width}")).status == 400, width
        assert (await server.http.get("/v1/files/file-other/pages/1")).status == 404


async def test_life_of_a_file(serve: Serve) -> None:
    async with serve() as server:
        files = server.client.files
        data = bytes(range(256)) * 9000  # 2.3 MB: over the part that is kept in memory
        record = await files.create(file=("第一章 report.pdf", data), purpose="user_data")
        assert (record.filename, record.bytes, record.purpose) == ("第一章 report.pdf", len(data), "user_data")
        assert record.status == "uploaded"
        assert record.model_extra is not None
        state = record.model_extra["perilune"]
        assert (state["status"], state["pages_parsed"], state["pages_total"]) == ("parsing", 3, 12)
        server.service.documents.finish(record.id)
        done = await files.wait_for_processing(record.id, poll_interval=0.01)
        assert done.status == "processed"
        raw = await server.http.get(f"/v1/files/{record.id}/content")
        assert await raw.read() == data
        assert raw.headers["content-disposition"].startswith("attachment;")
        assert raw.headers["x-content-type-options"] == "nosniff"
        assert raw.headers["content-length"] == str(len(data))
        assert (await files.content(record.id)).content == data
        for opened in server.service.documents.opened:
            assert opened.closed
            assert opened.longest <= 1024**2, "the whole file was in memory"
        deleted = await files.delete(record.id)
        assert deleted.deleted
        for call in (files.retrieve, files.delete, files.content):
            with pytest.raises(openai.NotFoundError):
                await call(record.id)


async def test_text_content(serve: Serve) -> None:
    async with serve() as server:
        record = await server.client.files.create(file=("a.txt", "月".encode()), purpose="assistants")
        reply = await server.http.get(f"/v1/files/{record.id}/content?format=text")
        assert await reply.text() == "月"
        assert (await server.http.get(f"/v1/files/{record.id}/content?format=html")).status == 400


async def test_listing_pages(serve: Serve) -> None:
    async with serve() as server:
        files = server.client.files
        for i in range(5):
            purpose = "user_data" if i % 2 else "assistants"
            await files.create(file=(f"{i}.txt", b"x"), purpose=purpose)  # type: ignore[arg-type]
        names = [record.filename async for record in files.list(limit=2)]
        assert names == ["4.txt", "3.txt", "2.txt", "1.txt", "0.txt"]
        assert [record.filename async for record in files.list(purpose="user_data", order="asc")] == [
            "1.txt",
            "3.txt",
        ]
        for query in ("limit=0", "limit=x", "limit=-1", "limit=99999", "order=up", "after=nothing"):
            assert (await server.http.get(f"/v1/files?{query}")).status == 400


async def test_size_limit(serve: Serve) -> None:
    async with serve(max_upload=10_000) as server:
        assert (await post(server, multipart(PURPOSE, (FILE[0], b"x" * 10_000))))[0] == 200
        status, body = await post(server, multipart(PURPOSE, (FILE[0], b"x" * 10_001)))
        assert (status, body["error"]["code"]) == (413, "too_large")
        with pytest.raises(openai.APIStatusError) as caught:
            await server.client.files.create(file=("big.txt", b"x" * 200_000), purpose="user_data")
        assert caught.value.status_code == 413

        async def endless() -> Any:
            yield multipart((FILE[0], b""), end=False)[:-2]
            for _ in range(100_000):
                yield b"x" * 1000

        try:
            status, body = await post(server, endless())
            assert status == 413
        except aiohttp.ClientConnectionError:
            pass  # the server answered and the client was still sending
        assert len(server.service.documents.files) == 1


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (multipart(PURPOSE, FILE, end=False), FORM),
        (multipart(PURPOSE, FILE)[:-20], FORM),
        (multipart(PURPOSE), FORM),
        (multipart(PURPOSE, FILE, FILE), FORM),
        (multipart(PURPOSE, ('name="file"', b"no filename")), FORM),
        (multipart(('name="purpose"', b"fine-tune"), FILE), FORM),
        (multipart(('name="purpose"', b"x" * 5000), FILE), FORM),
        (multipart(*[(f'name="f{i}"', b"") for i in range(40)], FILE), FORM),
        (b"", FORM),
        (b"garbage", FORM),
        (multipart(PURPOSE, FILE), {"content-type": "multipart/form-data"}),
        (multipart(PURPOSE, FILE), {"content-type": "multipart/form-data; boundary=" + "B" * 5000}),
        (multipart(PURPOSE, FILE), {"content-type": "application/json"}),
    ],
)
async def test_bad_forms(serve: Serve, body: bytes, headers: dict[str, str]) -> None:
    async with serve() as server:
        status, reply = await post(server, body, headers)
        assert status == 400, reply
        assert reply["error"]["message"]
        assert server.service.documents.files == {}


async def test_empty_file_is_the_librarys_to_refuse(serve: Serve) -> None:
    async with serve() as server:
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            await server.client.files.create(file=("empty.pdf", b""), purpose="user_data")
        assert caught.value.code == "unsupported_document"


async def test_upload_cut_by_the_client_stores_nothing(serve: Serve, tmp_path: Path) -> None:
    async with serve() as server:
        body = multipart(PURPOSE, (FILE[0], b"x" * 3_000_000))
        head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM['content-type']}\r\n"
        _, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:2_500_000])
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await eventually(lambda: 'route="/v1/files",status="499"' in server.shown_metrics())
        assert server.service.documents.files == {}
        assert list(tmp_path.iterdir()) == []  # no temporary file was left


async def test_full_disk_is_explained(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "write", full)
    async with serve() as server:
        status, body = await post(server, multipart(PURPOSE, FILE))
        assert status == 503
        assert "No space left" in body["error"]["message"]


async def test_slow_upload_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.api.limits.body_chunks.__defaults__", ("request body", 0.2))
    async with serve() as server:
        head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM['content-type']}\r\n"
        reply = await server.raw(f"{head}Content-Length: 1000\r\n\r\n--B\r\n".encode())
        assert b" 408 " in reply


@pytest.mark.parametrize(
    ("given_name", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\docs\\a.pdf", "a.pdf"),
        ("a\x00b\n.pdf", "ab.pdf"),
        ("", "unnamed"),
        ("..", ".."),
        ("月.pdf", "月.pdf"),
    ],
)
def test_filenames(given_name: str, shown: str) -> None:
    assert clean_filename(given_name) == shown


@given(st.text(max_size=600))
def test_filenames_are_short_and_flat(name: str) -> None:
    clean = clean_filename(name)
    assert 0 < len(clean.encode()) <= 255
    assert "/" not in clean
    assert clean.isprintable()


async def test_a_quote_in_a_name_survives_the_form(serve: Serve) -> None:
    """Browsers write it as %22; and so does httpx, which OpenAI's SDK sends with."""
    async with serve() as server:
        status, record = await post(
            server, multipart(PURPOSE, ('name="file"; filename="the %22new%22 100%.txt"', b"x"))
        )
        assert (status, record["filename"]) == (200, 'the "new" 100%.txt')
        sent = await server.client.files.create(file=('a "b".txt', b"x"), purpose="user_data")
        assert sent.filename == 'a "b".txt'


@pytest.mark.parametrize("step", [1, 7, 64, 1000])
async def test_pieces_of_any_size(serve: Serve, step: int) -> None:
    data = b"\r\n--B\r" * 50 + b"--B" + bytes(range(256))
    body = multipart(('name="file"; filename="a.bin"', data.replace(b"\r\n--B", b"\r\n--C")), PURPOSE)

    async def pieces() -> Any:
        for start in range(0, len(body), step):
            yield body[start : start + step]

    service = FakeService()
    async with serve(service) as server:
        status, record = await post(server, pieces())
        assert status == 200
        assert service.documents.files[record["id"]][1] == data.replace(b"\r\n--B", b"\r\n--C")
