"""The page's files: types, caching, packed forms, policy, and no key needed for them alone."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from perilune.api import web
from perilune.service.ports import Caller
from tests.api.conftest import Serve
from tests.api.fakes import FakeService


@pytest.fixture
def dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "dist"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>Perilune</title>")
    (folder / "favicon.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    script = folder / "assets" / "app-1a2b.js"
    script.write_text("export const answer = 42;\n")
    script.with_name("app-1a2b.js.gz").write_bytes(gzip.compress(script.read_bytes()))
    (folder / "build.log").write_text("not for browsers")
    (tmp_path / "secret.html").write_text("outside")
    monkeypatch.setattr(web.WebPage.__init__, "__defaults__", (folder,))
    return folder


async def test_the_page_needs_no_key_and_the_api_does(serve: Serve, dist: Path) -> None:
    async with serve(FakeService(keys={"k": Caller("acme", "user")}), public=True) as server:
        page = await server.http.get("/")
        assert (page.status, page.content_type) == (200, "text/html")
        assert "Perilune" in await page.text()
        policy = page.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert (await server.http.get("/assets/app-1a2b.js")).status == 200
        assert (await server.http.get("/v1/sessions")).status == 401
        for path in ("/assets/../index.html", "/assets/app.js", "/build.log", "/../secret.html", "/index.html/"):
            assert (await server.raw(f"GET {path} HTTP/1.0\r\nHost: x\r\n\r\n".encode())).split()[1] == b"401", path


async def test_caching_and_packed_forms(serve: Serve, dist: Path) -> None:
    async with serve() as server:
        page = await server.http.get("/")
        assert page.headers["cache-control"] == "no-cache"
        again = await server.http.get("/", headers={"If-None-Match": page.headers["etag"]})
        assert (again.status, await again.read()) == (304, b"")
        script = await server.http.get("/assets/app-1a2b.js")
        assert "immutable" in script.headers["cache-control"]
        assert script.content_type == "text/javascript"
        assert script.headers["content-encoding"] == "gzip"
        assert await script.text() == "export const answer = 42;\n"
        for accepts in ("identity", "br", "gzip;q=0"):
            plain = await server.http.get("/assets/app-1a2b.js", headers={"Accept-Encoding": accepts})
            assert "content-encoding" not in plain.headers
        assert (await server.http.get("/favicon.svg")).content_type == "image/svg+xml"
        assert (await server.http.get("/assets/gone.js")).status == 404
        assert (await server.http.get("/build.log")).status == 404
        assert (await server.http.post("/")).status == 405


async def test_without_built_files_the_page_says_what_to_do(serve: Serve, dist: Path) -> None:
    for path in sorted(dist.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    async with serve() as server:
        page = await server.http.get("/")
        assert page.status == 404
        assert "make web" in await page.text()


async def test_it_can_be_turned_off(serve: Serve, dist: Path) -> None:
    async with serve(web=False) as server:
        off = await server.http.get("/")
        assert (off.status, (await off.json())["error"]["code"]) == (404, "not_found")
