"""A SearXNG server (`GET /search?format=json`) as what a question finds on the web (spec M11).

Knows HTTP and SearXNG's JSON; the question leaves as departure.py lets it, and nothing else of the request does. It
asks the configured address alone: no redirect, no proxy of the environment, and never a page that a result names,
so that no result can make this server call anywhere. It distrusts what comes: sizes are bounded, and only titles,
http addresses and extracts are taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import orjson

from perilune.errors import ConfigError, Forbidden
from perilune.service.backends.departure import Departure, Leaving, Said
from perilune.service.backends.protocol import BackendFault, ChatMessage, FaultKind

NAME = "web_search"
MAX_QUERY_CHARS = 400
MAX_ANSWER_BYTES = 2 << 20
MAX_TITLE_CHARS, MAX_EXTRACT_CHARS, MAX_URL_CHARS = 200, 2_000, 1_000


@dataclass(frozen=True, slots=True)
class WebResult:
    """One result: where it is, and the search engine's extract of it."""

    title: str
    url: str
    extract: str


class SearXNG:
    """Asks the server at `url` (`http://host:8080`); each search ends within `timeout_s` seconds."""

    def __init__(self, url: str, departure: Departure, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ConfigError(
                "web_search.url isn't the base URL of a SearXNG server.",
                hint="Give one like http://localhost:8080, whose settings allow the format json.",
                param="web_search.url",
            )
        self._url = url.rstrip("/") + "/search"
        self._departure = departure
        self._timeout_s = timeout_s

    async def search(self, tenant: str, request_id: str, query: str, most: int) -> tuple[WebResult, ...]:
        """The `most` best results. Raises `BackendFault` where the question may not leave or no answer came."""
        asked = await self._leave(tenant, request_id, " ".join(query.split())[:MAX_QUERY_CHARS])
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._answer({"q": asked, "format": "json"})
        except TimeoutError:
            raise _fault(FaultKind.TIMED_OUT, f"said nothing within {self._timeout_s:g} seconds.") from None
        except (aiohttp.ClientError, OSError):
            raise _fault(FaultKind.UNREACHABLE, "can't be reached.") from None
        return tuple(result for result, _ in zip(_results(answer), range(most), strict=False))

    async def _leave(self, tenant: str, request_id: str, query: str) -> str:
        """The only way of text into a search."""
        leaving = Leaving(tenant, NAME, request_id, Said((ChatMessage("user", query),)))
        try:
            return (await self._departure.leave(leaving)).said.messages[0].text
        except Forbidden:
            raise _fault(FaultKind.KEPT, "may not get this tenant's text.") from None

    async def _answer(self, asked: dict[str, str]) -> object:
        connector, jar = aiohttp.TCPConnector(limit=1), aiohttp.DummyCookieJar()
        async with (
            aiohttp.ClientSession(connector=connector, cookie_jar=jar, trust_env=False) as session,
            session.get(self._url, params=asked, allow_redirects=False) as response,
        ):
            if response.status != 200:
                hint = " (are its settings without the format json?)" if response.status == 403 else ""
                raise _fault(FaultKind.DENIED, f"refused with status {response.status}{hint}.")
            parts, size_bytes = [], 0
            async for piece in response.content.iter_any():
                parts.append(piece)
                size_bytes += len(piece)
                if size_bytes > MAX_ANSWER_BYTES:
                    raise _fault(FaultKind.BROKEN, f"sent more than {MAX_ANSWER_BYTES >> 20} MB.")
        try:
            return orjson.loads(b"".join(parts))
        except orjson.JSONDecodeError:
            raise _fault(FaultKind.BROKEN, "sent something that is no JSON.") from None


def _results(answer: object) -> Iterator[WebResult]:
    """What is usable of an answer, in its order; a page comes once."""
    found = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(found, list):
        raise _fault(FaultKind.BROKEN, "sent JSON without results.")
    seen: set[str] = set()
    for each in found:
        title, url, extract = (_line(each, key) for key in ("title", "url", "content"))
        if not url.startswith(("http://", "https://")) or len(url) > MAX_URL_CHARS or url in seen:
            continue
        if extract:
            seen.add(url)
            yield WebResult(title[:MAX_TITLE_CHARS] or url, url, extract[:MAX_EXTRACT_CHARS])


def _line(result: object, key: str) -> str:
    value = result.get(key) if isinstance(result, dict) else None
    return " ".join(value.split()) if isinstance(value, str) else ""


def _fault(kind: FaultKind, detail: str) -> BackendFault:
    return BackendFault(kind, NAME, detail)
