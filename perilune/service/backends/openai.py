"""Any OpenAI-compatible URL as a backend (vLLM, llama.cpp, SGLang, another perilune, DeepSeek, Moonshot …).

Knows HTTP and which status means what; the dialect is in dialect.py, what may leave in departure.py. It always
streams: only so a hang is told from a long answer, and the time to the first token is known. It follows no
redirect, no proxy of the environment and no address but the configured one. It distrusts what comes: sizes are
bounded, and nothing of it is quoted in errors.
"""

from __future__ import annotations

import asyncio
import email.utils
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import aiohttp
import orjson

from perilune.core import ChoiceFinished, ReasoningDelta, TextDelta, ToolCallDelta, Usage
from perilune.errors import ConfigError, Forbidden
from perilune.service.backends.departure import AsWritten, Departed, Departure, Leaving, Said, Thought
from perilune.service.backends.dialect import ChunkReader, Malformed, UpstreamError, body_of, error_code
from perilune.service.backends.protocol import BackendDone, BackendEvent, BackendFault, Call, FaultKind
from perilune.service.backends.sse import EventReader, EventTooLong

_MAX_ERROR_BYTES = 64 * 1024
_MAX_MODELS_BYTES = 4 << 20
_LONGEST_WAIT_S = 86_400.0
_KEEP_ALIVE_S = 3.0  # uvicorn closes idle connections after 5

_TOO_LONG_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error", "string_above_max_length"})
_LIMIT_CODES = frozenset({"rate_limit_exceeded", "rate_limit_reached_error", "insufficient_quota"})


@dataclass(frozen=True, slots=True)
class Address:
    """Where a backend is and how it is asked. `url` is what `/chat/completions` follows; `key` is empty where none
    is needed. `silence_s` is the longest pause inside a stream."""

    name: str
    url: str
    model: str
    window_tokens: int
    key: str = ""
    connect_s: float = 2.0
    silence_s: float = 60.0
    probe_s: float = 5.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ConfigError(
                f"Backend {self.name}: the url isn't the base URL of a server.",
                hint="Give one like https://host/v1, with the key in key_env.",
                param="backends",
            )


class OpenAIBackend:
    """Implements `Backend`. Used from one event loop; the connections are made there on first use."""

    def __init__(self, address: Address, departure: Departure | None = None) -> None:
        self._address = address
        self._base = address.url.rstrip("/")
        self._departure = departure or AsWritten()
        self._session: aiohttp.ClientSession | None = None

    @property
    def name(self) -> str:
        return self._address.name

    @property
    def model_id(self) -> str:
        return self._address.model

    @property
    def window_tokens(self) -> int:
        return self._address.window_tokens

    async def chat(self, call: Call) -> AsyncGenerator[BackendEvent, None]:
        """See `Backend.chat`."""
        departed = await self._leave(call)
        reader = ChunkReader(call.n)
        body = body_of(call, departed, self.model_id)
        async with self._asked("POST", "/chat/completions", body, None) as response:
            if response.content_type != "text/event-stream":
                raise self._fault(FaultKind.BROKEN, "answered with something that is no event stream.")
            async for data in self._data(response):
                for event in self._read(reader, data):
                    for shown in _reversed(event, departed, reader):
                        yield shown
        if not reader.complete:
            raise self._fault(FaultKind.BROKEN, "broke off in the middle of its answer.")
        usage = reader.usage
        yield BackendDone(
            usage or Usage(0, reader.pieces, 0), counted=usage is not None, taken_out=departed.taken_out
        )

    async def probe(self) -> None:
        """Ask for the list of models: every such server has one, and it costs no tokens."""
        async with self._asked("GET", "/models", None, self._address.probe_s) as response:
            if await self._bounded(response, _MAX_MODELS_BYTES) is None:
                raise self._fault(FaultKind.BROKEN, "has a list of models that is no JSON.")

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # ----------------------------------------------------------------------------------- what leaves

    async def _leave(self, call: Call) -> Departed:
        """The only way of text into a body."""
        tools, grammar = call.tools, call.sampling.grammar
        offered = tuple(each for each in tools.offered if tools.allowed is None or each.name in tools.allowed)
        said = Said(call.messages, call.sampling.stop, offered, None if grammar is None else grammar.source)
        try:
            return await self._departure.leave(Leaving(call.tenant, self.name, call.request_id, said))
        except Forbidden:
            raise self._fault(FaultKind.KEPT, "may not get this tenant's text.") from None

    # ---------------------------------------------------------------------------------------- HTTP

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, body: bytes | None, total_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response with status 200. However this is left, an answer that isn't complete costs its connection:
        that tells the server to stop."""
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._sent(method, path, body, total_s)
            if response.status != 200:
                raise await self._refusal(response)
            yield response
            response.release()
        except TimeoutError:  # aiohttp's own are TimeoutErrors, too
            raise self._fault(FaultKind.TIMED_OUT, "was silent for too long.") from None
        except aiohttp.ClientConnectorError:
            raise self._fault(FaultKind.UNREACHABLE, "can't be reached.") from None
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, OSError):
            raise self._fault(FaultKind.UNREACHABLE, "closed the connection.") from None
        except (aiohttp.ClientError, ValueError):
            raise self._fault(FaultKind.BROKEN, "answered with something that is no HTTP.") from None
        finally:
            if response is not None:
                response.close()  # nothing, where it was released

    async def _sent(
        self, method: str, path: str, body: bytes | None, total_s: float | None
    ) -> aiohttp.ClientResponse:
        """Send; once more where a connection that had waited in the pool was closed or reset by the server just
        then."""
        limits = aiohttp.ClientTimeout(
            total=total_s, sock_connect=self._address.connect_s, sock_read=self._address.silence_s
        )
        session = self._opened()
        for last in (False, True):
            try:
                return await session.request(
                    method, self._base + path, data=body, timeout=limits, allow_redirects=False
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if last or isinstance(error, aiohttp.ClientConnectorError):
                    raise
        raise AssertionError("unreachable")

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"content-type": "application/json", "accept": "text/event-stream, application/json"}
            if self._address.key:
                headers["authorization"] = f"Bearer {self._address.key}"
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                headers=headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
            )
        return self._session

    async def _data(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The data of every event, to `[DONE]` or the end."""
        events = EventReader()
        async for piece in response.content.iter_any():
            try:
                for data in events.feed(piece):
                    if data == b"[DONE]":
                        return
                    yield data
            except EventTooLong:
                raise self._fault(FaultKind.BROKEN, "sent an event without end.") from None

    def _read(self, reader: ChunkReader, data: bytes) -> Iterator[BackendEvent]:
        try:
            yield from reader.read(data)
        except Malformed:
            raise self._fault(FaultKind.BROKEN, "sent something that isn't the chat dialect.") from None
        except UpstreamError as error:
            raise self._of_code(error.code, FaultKind.OVERLOADED, None) from None

    async def _refusal(self, response: aiohttp.ClientResponse) -> BackendFault:
        """What another status than 200 means."""
        status, wait_s = response.status, retry_after_s(response.headers.get("retry-after"), time.time())
        code = error_code(await self._bounded(response, _MAX_ERROR_BYTES))
        if status == 429:
            return self._of_code(code, FaultKind.LIMITED, wait_s)
        if status >= 500:
            return self._of_code(code, FaultKind.OVERLOADED, wait_s)
        if status in (401, 403, 404, 407):
            return self._fault(
                FaultKind.DENIED, f"doesn't let this server in, or lacks the model (status {status})."
            )
        if status in (408, 425):
            return self._fault(FaultKind.TIMED_OUT, f"didn't take the request (status {status}).")
        if 300 <= status < 400:
            return self._fault(
                FaultKind.DENIED, f"sends requests elsewhere (status {status}), which isn't followed."
            )
        return self._of_code("context_length_exceeded" if status == 413 else code, FaultKind.REFUSED, wait_s)

    def _of_code(self, code: str, otherwise: FaultKind, wait_s: float | None) -> BackendFault:
        """A fault by the code that came with it."""
        if code in _TOO_LONG_CODES:
            return self._fault(FaultKind.TOO_LONG, "says that the prompt is longer than its window.")
        if code in _LIMIT_CODES or otherwise is FaultKind.LIMITED:
            return self._fault(FaultKind.LIMITED, "has no quota left for now.", wait_s)
        if otherwise is FaultKind.OVERLOADED:
            return self._fault(FaultKind.OVERLOADED, "is overloaded or failed.", wait_s)
        return self._fault(FaultKind.REFUSED, f"refused the request ({code or 'without a reason'}).", wait_s)

    async def _bounded(self, response: aiohttp.ClientResponse, most_bytes: int) -> object:
        """A body as JSON; None where it is none, or is too long."""
        parts: list[bytes] = []
        size_bytes = 0
        async with asyncio.timeout(self._address.probe_s):
            async for piece in response.content.iter_any():
                parts.append(piece)
                size_bytes += len(piece)
                if size_bytes > most_bytes:
                    return None
        try:
            return orjson.loads(b"".join(parts))
        except orjson.JSONDecodeError:
            return None

    def _fault(self, kind: FaultKind, detail: str, wait_s: float | None = None) -> BackendFault:
        return BackendFault(kind, self.name, detail, wait_s)


def _reversed(event: BackendEvent, departed: Departed, reader: ChunkReader) -> Iterator[BackendEvent]:
    """An event with the answer's text as the caller may see it."""
    if isinstance(event, ToolCallDelta):
        arguments = departed.reverser.push((event.choice, event.index), event.arguments)
        if arguments or event.name:
            yield replace(event, arguments=arguments)
        return
    if isinstance(event, ReasoningDelta):
        if text := departed.reverser.push(Thought(event.choice), event.text):
            yield replace(event, text=text)
        return
    if isinstance(event, TextDelta | ChoiceFinished):
        yield from _last_thought(event.choice, departed, reader)
    if isinstance(event, TextDelta):
        text = departed.reverser.push(event.choice, event.text)
        logprobs = () if departed.altered else event.logprobs
        if text or logprobs:
            yield replace(event, text=text, logprobs=logprobs)
        return
    if isinstance(event, ChoiceFinished):
        if tail := departed.reverser.flush(event.choice):
            yield TextDelta(event.choice, tail)
        for stream in sorted(each for each in reader.calls if each[0] == event.choice):
            if tail := departed.reverser.flush(stream):
                yield ToolCallDelta(*stream, tail)
    yield event


def _last_thought(choice: int, departed: Departed, reader: ChunkReader) -> Iterator[BackendEvent]:
    """What was held back of a choice's thoughts, once it speaks."""
    if choice in reader.thinking:
        reader.thinking.remove(choice)
        if tail := departed.reverser.flush(Thought(choice)):
            yield ReasoningDelta(choice, tail)


def retry_after_s(value: str | None, now: float) -> float | None:
    """Seconds of a Retry-After header, as a number or a date; None for anything else, at most a day."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), _LONGEST_WAIT_S) if math.isfinite(seconds) else None
