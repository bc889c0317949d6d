"""The web chat's files: `perilune/web/dist`, as it was built, under `/`.

Knows files and HTTP caching, nothing of what the page does. The files are listed once, at the start: a request
can't name anything else. Nothing is compressed here; the build leaves `X.br` and `X.gz` beside `X`. The page needs
no key, because it holds nothing of anybody's; what it asks the API does.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import perilune
from perilune.errors import NotFound

DIST = Path(perilune.__file__).parent / "web" / "dist"
ASSETS = "/assets/"
"""Names under this path hold a hash of their content, so that a browser never asks for one twice."""

POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "font-src 'self'",
        "connect-src 'self'",
        "worker-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Content-Security-Policy: whatever a document or a model writes, it can't run, load or send anything."""

_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
    ".txt": "text/plain; charset=utf-8",
}
_ENCODINGS = {"br": ".br", "gzip": ".gz"}  # the better one first
_FOREVER, _EACH_TIME = "public, max-age=31536000, immutable", "no-cache"
_NOT_BUILT = """The web chat isn't part of this installation: perilune/web/dist is missing.

From a checkout, `make web` builds it. The API works without it: docs/api.md.
"""


@dataclass(frozen=True, slots=True)
class _File:
    """`packed` maps an encoding to the file that holds it."""

    path: Path
    media_type: str
    etag: str
    packed: Mapping[str, Path]


class WebPage:
    """The files of one folder, as routes. `paths` need no key."""

    def __init__(self, folder: Path = DIST) -> None:
        self._files = _listed(folder)

    @property
    def paths(self) -> frozenset[str]:
        return frozenset({"/", *self._files})

    @property
    def routes(self) -> list[Route]:
        alone = [path for path in self._files if not path.startswith(ASSETS)]
        return [Route(path, self.file) for path in ("/", *alone, ASSETS + "{name:path}")]

    async def file(self, request: Request) -> Response:
        """GET. Raises `NotFound` for what isn't there."""
        path = request.scope["path"]
        found = self._files.get("/index.html" if path == "/" else path)
        if found is None and path == "/":
            return Response(_NOT_BUILT, 404, headers=_HEADERS, media_type="text/plain")
        if found is None:
            raise NotFound("There is no such file of the page.", hint="Load the page again.")
        caching = _FOREVER if path.startswith(ASSETS) else _EACH_TIME
        headers = {**_HEADERS, "cache-control": caching, "etag": found.etag, "vary": "accept-encoding"}
        if found.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        taken = _accepted(request.headers.get("accept-encoding", ""))
        encoding = next((each for each in found.packed if each in taken), None)
        if encoding is not None:
            headers["content-encoding"] = encoding
        source = found.path if encoding is None else found.packed[encoding]
        data = await asyncio.to_thread(source.read_bytes)
        return Response(data, headers={**headers, "content-type": found.media_type})


def _listed(folder: Path) -> dict[str, _File]:
    """Every file by the path it is asked for; none where nothing was built."""
    found = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        media_type = _TYPES.get(path.suffix)
        if media_type is None:  # a packed form, or nothing for browsers
            continue
        packed = {
            name: beside
            for name, suffix in _ENCODINGS.items()
            if (beside := path.with_name(path.name + suffix)).is_file()
        }
        etag = f'"{hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()}"'
        found["/" + path.relative_to(folder).as_posix()] = _File(path, media_type, etag, packed)
    return found


def _accepted(header: str) -> set[str]:
    """The encodings that an Accept-Encoding header takes."""
    pairs = (each.partition(";") for each in header.lower().split(","))
    return {name.strip() for name, _, weight in pairs if weight.replace(" ", "") not in ("q=0", "q=0.0")}
