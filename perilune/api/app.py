"""The HTTP application: routes, the layers around them, and the server that runs them.

Knows which path leads where and what every request passes through, outermost first: `Gateway` (request id, errors,
log, metrics), `LocalOnly` (Host and Origin, on loopback), `Authentication`. Knows no wire format and no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.api import errors, openapi
from perilune.api.auth import OPEN_PATHS, Authentication, LocalOnly, check_bind, is_loopback
from perilune.api.balance import Balances
from perilune.api.batch_lines import EndpointLines
from perilune.api.batches import Batches
from perilune.api.chat import ChatCompletions, ResumeChat
from perilune.api.completions import COMPLETIONS, CreateCompletion
from perilune.api.connection import Connection
from perilune.api.conversations import Conversations
from perilune.api.counting import ANTHROPIC_COUNT, MOONSHOT_COUNT, RESPONSES_COUNT, CountTokens
from perilune.api.embeddings import Embeddings
from perilune.api.estimate import Estimates
from perilune.api.feedback import FeedbackRoutes
from perilune.api.files import Files
from perilune.api.health import Health
from perilune.api.kv import KV
from perilune.api.limits import MAX_HEADER_BYTES, InFlight, check_headers
from perilune.api.machine import MachineRoute
from perilune.api.memory import MemoryViews
from perilune.api.messages import ANTHROPIC
from perilune.api.messages_answer import error_body, rate_headers
from perilune.api.models import Models
from perilune.api.ratings import RatingRoutes
from perilune.api.responses import RESPONSES, CountResponse, CreateResponse, KeptResponses, ResponseItem, before_of
from perilune.api.responses_answer import interrupted
from perilune.api.responses_compact import Compact
from perilune.api.resume import Resumables
from perilune.api.sessions import Sessions
from perilune.api.uploads import Uploads
from perilune.api.vector_stores import VectorStoreRoutes
from perilune.api.web import WebPage
from perilune.api.wire import json_response
from perilune.config import Settings
from perilune.errors import ConfigError, Conflict
from perilune.ops.metrics import PrometheusSink
from perilune.service.ports import ServiceApi
from perilune.telemetry import Telemetry

GRACE_S = 10
"""How long open answers may run on once the server was told to stop."""

_UNWIND_S = 2.0
_CLIENT_CLOSED = 499
_SPARE_CONNECTIONS = 32
_ALWAYS_ANSWERED = frozenset({"/health", "/ready", "/version", "/metrics"})

log = logging.getLogger("perilune.api")


def create_app(
    service: ServiceApi, settings: Settings, *, telemetry: Telemetry, metrics: PrometheusSink
) -> Starlette:
    """The application. `metrics` is the sink behind `telemetry`, shown under /metrics."""
    public = not is_loopback(settings.server.host)
    resumables = Resumables()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if left := await service.responses.recover(interrupted):
            log.warning("answers left unfinished by the last run", extra={"fields": {"answers": left}})
        yield
        await resumables.close()

    routes = [
        *_answering(service, settings, telemetry, resumables),
        *_keeping(service, settings),
        *_running(service, metrics),
    ]
    service.batches.serve(EndpointLines(routes))
    open_paths = OPEN_PATHS
    if settings.server.web:
        page = WebPage()
        routes += page.routes
        open_paths |= page.paths
    in_flight = InFlight(settings.server.max_queue + settings.runtime.max_batch_size + _SPARE_CONNECTIONS)
    middleware = [Middleware(Gateway, telemetry=telemetry, in_flight=in_flight)]
    if not public:
        middleware.append(Middleware(LocalOnly))
    middleware.append(Middleware(Authentication, service=service, public=public, open_paths=open_paths))
    app = Starlette(
        routes=routes, middleware=middleware, exception_handlers={HTTPException: _no_route}, lifespan=lifespan
    )
    app.router.redirect_slashes = False
    return app


def _answering(
    service: ServiceApi, settings: Settings, telemetry: Telemetry, resumables: Resumables
) -> list[Route]:
    """Answers in every dialect, kept ones, and what a prompt would take."""
    chat = ChatCompletions(service, settings, telemetry, resumables)
    messages = ChatCompletions(service, settings, telemetry, resumables, ANTHROPIC)
    creating = CreateResponse(service, settings, telemetry, resumables, RESPONSES)
    count_messages = CountTokens(service, settings, ANTHROPIC_COUNT)
    kept, talks = KeptResponses(service, creating.runs), Conversations(service, settings)
    return [
        Route("/v1/users/me/balance", Balances(service).read),
        Route("/v1/embeddings", Embeddings(service, settings).create, methods=["POST"]),
        Route(
            "/v1/completions",
            CreateCompletion(service, settings, telemetry, resumables, COMPLETIONS),
            methods=["POST"],
        ),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/chat/completions/{completion_id}", ResumeChat(chat), methods=["GET", "DELETE"]),
        *[
            Route(f"{root}/v1/messages{rest}", endpoint, methods=["POST"])
            for root in ("", "/anthropic")
            for rest, endpoint in (("", messages), ("/count_tokens", count_messages))
        ],
        Route("/v1/responses/input_tokens", CountResponse(service, settings, RESPONSES_COUNT), methods=["POST"]),
        Route("/v1/responses/compact", Compact(service, settings, before_of), methods=["POST"]),
        Route("/v1/responses", creating, methods=["POST"]),
        Route("/v1/responses/{response_id}", ResponseItem(service, creating), methods=["GET", "DELETE"]),
        Route("/v1/responses/{response_id}/cancel", kept.cancel, methods=["POST"]),
        Route("/v1/responses/{response_id}/input_items", kept.input_items),
        Route("/v1/conversations", talks.create, methods=["POST"]),
        Route("/v1/conversations/{conversation_id}", talks.item, methods=["GET", "POST", "DELETE"]),
        Route("/v1/conversations/{conversation_id}/items", talks.items, methods=["GET", "POST"]),
        Route("/v1/conversations/{conversation_id}/items/{item_id}", talks.one_item, methods=["GET", "DELETE"]),
        Route(
            "/v1/tokenizers/estimate-token-count", CountTokens(service, settings, MOONSHOT_COUNT), methods=["POST"]
        ),
        Route("/v1/estimate", Estimates(service, settings).estimate, methods=["POST"]),
    ]


def _keeping(service: ServiceApi, settings: Settings) -> list[Route]:
    """Documents, sessions and memory."""
    files = Files(service, settings.server.max_upload, settings.home)
    uploads, batches = Uploads(service, settings.home), Batches(service)
    sessions, memory, feedback = Sessions(service), MemoryViews(service), FeedbackRoutes(service)
    ratings = RatingRoutes(service)
    return [
        Route("/v1/files", files.collection, methods=["GET", "POST"]),
        Route("/v1/files/{file_id}", files.item, methods=["GET", "DELETE"]),
        Route("/v1/files/{file_id}/content", files.content),
        Route("/v1/files/{file_id}/pages/{page}", files.page),
        Route("/v1/files/{file_id}/pages/{page}/image", files.page_image),
        Route("/v1/uploads", uploads.create, methods=["POST"]),
        Route("/v1/uploads/{upload_id}/parts", uploads.add_part, methods=["POST"]),
        Route("/v1/uploads/{upload_id}/complete", uploads.complete, methods=["POST"]),
        Route("/v1/uploads/{upload_id}/cancel", uploads.cancel, methods=["POST"]),
        Route("/v1/batches", batches.collection, methods=["GET", "POST"]),
        Route("/v1/batches/{batch_id}", batches.item),
        Route("/v1/batches/{batch_id}/cancel", batches.cancel, methods=["POST"]),
        Route("/v1/sessions", sessions.collection),
        Route("/v1/sessions/{session_id:path}/fork", sessions.fork, methods=["POST"]),
        Route("/v1/sessions/{session_id:path}", sessions.item, methods=["GET", "PATCH", "DELETE"]),
        Route("/v1/memory", sessions.everything, methods=["DELETE"]),
        *VectorStoreRoutes(service).routes(),
        Route("/v1/feedback", ratings.collection, methods=["GET", "POST"]),
        Route("/v1/feedback/export", ratings.export),
        Route("/v1/feedback/{feedback_id}", ratings.item, methods=["GET", "DELETE"]),
        Route("/v1/memory/feedback", feedback.collection, methods=["GET", "POST"]),
        Route("/v1/memory/feedback/{feedback_id}", feedback.item, methods=["DELETE"]),
        Route("/v1/memory/search", sessions.search, methods=["POST"]),
        Route("/v1/memory/profile", memory.profile, methods=["GET", "PATCH", "DELETE"]),
        Route("/v1/memory/summary", memory.summary, methods=["GET", "PATCH"]),
        Route("/v1/memory/export", memory.export),
    ]


def _running(service: ServiceApi, metrics: PrometheusSink) -> list[Route]:
    """Models, backends, the KV cache, and how the server is."""
    models, kv, health = Models(service), KV(service), Health(service, metrics)
    return [
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.retrieve),
        Route("/v1/backends", models.backends),
        Route("/v1/machine", MachineRoute(service).show),
        Route("/v1/kv/health", kv.health),
        Route("/v1/kv/attention_debug", kv.attention_debug, methods=["PUT"]),
        Route("/health", health.health),
        Route("/ready", health.ready),
        Route("/version", health.version),
        Route(openapi.PATH, openapi.openapi),
        Route("/metrics", health.metrics),
    ]


async def _no_route(request: Request, error: Exception) -> Response:
    """Starlette's 404 and 405 in the one error shape."""
    if not isinstance(error, HTTPException):
        raise error
    shown = errors.from_http(error, _method(request.scope))
    response = json_response(_shape(request.url.path, "")(shown), shown.status)
    response.headers.update(error.headers or {})
    return response


def _is_anthropic(path: str) -> bool:
    return path.startswith(("/v1/messages", "/anthropic/"))


def _shape(path: str, request_id: str) -> errors.Shape:
    """How errors look to the clients of a path."""
    if _is_anthropic(path):
        return partial(error_body, request_id=request_id or None)
    return errors.body


class Gateway:
    """Gives every request an id, turns every failure into one error body, logs and counts one line a request.

    The id is the server's own: one chosen by a client could collide with another's (PYSEC-2026-4198).
    """

    def __init__(
        self,
        app: ASGIApp,
        telemetry: Telemetry,
        in_flight: InFlight,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._app = app
        self._telemetry = telemetry
        self._in_flight = in_flight
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        start_s = self._clock()
        out = _Response(send, request_id)
        try:
            await self._guarded(scope, receive, out)
        finally:
            self._account(scope, request_id, out.status, self._clock() - start_s)

    async def _guarded(self, scope: Scope, receive: Receive, out: _Response) -> None:
        try:
            check_headers(scope)
            with contextlib.ExitStack() as held:
                if scope["path"] not in _ALWAYS_ANSWERED:
                    held.enter_context(self._in_flight.slot())
                self._telemetry.gauge("http_requests_open", self._in_flight.count)
                await self._app(scope, receive, out)
        except errors.ClientGone:
            out.status = _CLIENT_CLOSED
            self._telemetry.count("http_disconnects", route=_route(scope))
        except Exception as error:
            shown = errors.from_any(error, out.request_id)
            if not out.started:
                path = scope["path"]
                rates = rate_headers if _is_anthropic(path) else errors.rate_headers
                await errors.send_error(out, shown, shape=_shape(path, out.request_id), rates=rates)

    def _account(self, scope: Scope, request_id: str, status: int, spent_s: float) -> None:
        route = _route(scope)
        self._telemetry.gauge("http_requests_open", self._in_flight.count)
        self._telemetry.count("http_requests", route=route, method=_method(scope), status=str(status))
        self._telemetry.observe("http_request_seconds", spent_s, route=route)
        caller = scope["state"].get("caller")
        fields = {
            "request_id": request_id,
            "method": _method(scope),
            "route": route,
            "status": status,
            "duration_ms": round(1000 * spent_s, 1),
            "tenant": caller.tenant if caller is not None else None,
        }
        log.info("request", extra={"fields": fields})


class _Response:
    """A `send` that adds the request id and remembers whether and with what status the response began."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status = _CLIENT_CLOSED  # until a response begins
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            name = self.request_id.encode()  # OpenAI's clients read the first, Anthropic's the second
            headers = [*message.get("headers", ()), (b"x-request-id", name), (b"request-id", name)]
            message = {**message, "headers": headers}
        await self._send(message)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def _method(scope: Scope) -> str:
    """Bounded: a method is any token that a client likes."""
    method: str = scope["method"]
    return method if method in _METHODS else "OTHER"


def _route(scope: Scope) -> str:
    """The route's pattern, never the path itself: paths hold ids, and anything a client likes."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else "other"


class _Server(uvicorn.Server):
    """Stops gracefully on SIGINT and SIGTERM and then returns, so that the caller can close the service."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self.signal_number: int | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _stop(self, number: int) -> None:
        """The first signal lets open answers end; a second one doesn't wait for them."""
        self.force_exit = self.signal_number is not None
        self.signal_number = number
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `Conflict` for a port that can't be used, `ConfigError` for a bad host."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        raise ConfigError(
            f"{host} isn't an address of this machine.", hint="Use 127.0.0.1.", param="server.host"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise Conflict(
            f"Port {port} on {host} can't be used ({error.strerror}).",
            hint="Choose another with --port, or stop the program that uses it.",
            param="server.port",
        ) from None
    return listener


async def serve(
    app: Starlette,
    service: ServiceApi,
    settings: Settings,
    on_ready: Callable[[str], None] = lambda url: None,
) -> int:
    """Run `app` until SIGINT or SIGTERM; returns the exit code (130 after SIGINT, else 0).

    `on_ready` gets the base URL once connections are accepted. Open answers get `GRACE_S` to end, then are told.
    Must run in the main thread, because it takes the signals. Raises `ConfigError` and `Conflict` as `check_bind`
    and `listen` do. The caller closes the service afterwards.
    """
    host = settings.server.host
    await check_bind(service, host)
    listener = listen(host, settings.server.port)
    server = _Server(
        uvicorn.Config(
            app,
            http=Connection,  # bounds headers, connections and time
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=GRACE_S,
        ),
        lambda: on_ready(url_of(host, listener.getsockname()[1])),
    )
    try:
        await server.serve(sockets=[listener])
    finally:
        listener.close()
        if server.server_state.tasks:
            await asyncio.wait(server.server_state.tasks, timeout=_UNWIND_S)
    return 130 if server.signal_number == signal.SIGINT else 0


def url_of(host: str, port: int) -> str:
    """The base URL of the API, as clients need it."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"
