"""A SearXNG server on a loopback socket that answers what a test wants, and a record of what it was asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Searx:
    """`asked` are the queries' parameters, in order; `paths` all that was fetched of it."""

    port: int = 0
    asked: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def results(*found: tuple[str, str, str]) -> Reply:
    """What SearXNG says (its `/search?format=json`) with (title, url, content) as results."""

    async def reply(request: web.Request) -> web.StreamResponse:
        listed = [
            {"title": title, "url": url, "content": content, "engine": "duckduckgo", "score": 1.0}
            for title, url, content in found
        ]
        body = {"query": request.query["q"], "number_of_results": 0, "results": listed, "answers": []}
        return web.Response(text=json.dumps(body), content_type="application/json")

    return reply


def raw(body: bytes, status: int = 200, headers: Sequence[tuple[str, str]] = ()) -> Reply:
    async def reply(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status, headers=dict(headers))

    return reply


@asynccontextmanager
async def searx(reply: Reply) -> AsyncIterator[Searx]:
    made = Searx()

    async def handle(request: web.Request) -> web.StreamResponse:
        made.paths.append(request.path)
        made.asked.append(dict(request.query))
        return await reply(request)

    application = web.Application()
    application.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.port = runner.addresses[0][1]
    try:
        yield made
    finally:
        await runner.cleanup()
