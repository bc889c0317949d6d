"""Who may ask: Host and Origin checks, bearer keys, roles, and which addresses may be bound (spec X3).

Decides on the raw ASGI `scope["path"]`, never on a rebuilt URL (Starlette CVE-2026-48710), and refuses by
default: a path that isn't listed as open needs a caller. Doesn't know keys; `service.authenticate` does.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from perilune.api.errors import ForbiddenHost
from perilune.api.limits import header
from perilune.errors import ConfigError, Forbidden, Unauthenticated
from perilune.memory.audit import acting
from perilune.service.ports import Caller, ServiceApi

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/openapi.json"})
ADMIN_PATHS = frozenset({"/metrics", "/v1/kv/health", "/v1/kv/attention_debug", "/v1/backends"})
"""What tells of the whole machine, and so of other tenants' load."""

MAX_KEY_CHARS = 512
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::[0-9]{0,5})?", re.ASCII)
_WRITERS = frozenset({"admin", "user"})


def is_loopback(host: str) -> bool:
    """Whether an address (not a name, except `localhost`) reaches only this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


async def keys_exist(service: ServiceApi) -> bool:
    """True when a caller without a key is refused."""
    try:
        await service.authenticate(None)
    except Unauthenticated:
        return True
    return False


async def check_bind(service: ServiceApi, host: str) -> None:
    """Raises `ConfigError` for a public address while no key exists: anyone could read every document."""
    if not is_loopback(host) and not await keys_exist(service):
        raise ConfigError(
            f"{host or 'The empty address'} can be reached from other machines, and no key exists yet.",
            hint="Create one with `perilune keys create`, or bind 127.0.0.1.",
            param="server.host",
        )


def require_admin(caller: Caller) -> None:
    """Raises `Forbidden` for a caller that doesn't run this server."""
    if caller.role != "admin":
        raise Forbidden(
            f"A key with the role {caller.role} can't see the whole server.", hint="Use a key with the role admin."
        )


def actor_of(caller: Caller) -> str:
    """How the audit table names a caller: by its key, never by a name that it chose."""
    return f"key:{caller.key_id}" if caller.key_id else "local"


def require_writer(caller: Caller) -> None:
    """Raises `Forbidden` for a caller that may only read and ask."""
    if caller.role not in _WRITERS:
        raise Forbidden(
            f"A key with the role {caller.role} can't change what is stored.", hint="Use a key with the role user."
        )


def host_name(value: str) -> str:
    """The host of a Host header or an origin's authority, without its port; empty for anything unusual."""
    match = _AUTHORITY.fullmatch(value)
    return match[1].lower() if match else ""


class LocalOnly:
    """Middleware of a loopback server: Host must name this machine, and so must Origin when a browser sends one.

    Without it any web page could reach the server: by DNS rebinding, or by a form that posts across origins.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = (header(scope, b"host") or b"").decode("latin-1")
            if not is_loopback(host_name(host)):
                raise ForbiddenHost(
                    "The Host header doesn't name this machine.", hint="Use http://127.0.0.1 or http://localhost."
                )
            origin = header(scope, b"origin")
            if origin is not None and not self._is_local_origin(origin.decode("latin-1")):
                raise ForbiddenHost(
                    "A web page of another origin can't use this server.", hint="Open it from this machine."
                )
        await self._app(scope, receive, send)

    @staticmethod
    def _is_local_origin(origin: str) -> bool:
        scheme, separator, authority = origin.partition("://")
        return bool(separator) and scheme in {"http", "https"} and is_loopback(host_name(authority))


class Authentication:
    """Middleware: puts the `Caller` into `scope["state"]`, or raises `Unauthenticated`.

    On a public address a key must exist at every request, not only when the server was started.
    """

    def __init__(
        self, app: ASGIApp, service: ServiceApi, public: bool, open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._service = service
        self._public = public
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            key = bearer_key(header(scope, b"authorization")) or plain_key(header(scope, b"x-api-key"))
            if self._public and not await keys_exist(self._service):
                raise Unauthenticated("No key exists.", hint="Create one with `perilune keys create`.")
            caller = await self._service.authenticate(key)
            scope["state"]["caller"] = caller
            if scope["path"] in ADMIN_PATHS:
                require_admin(caller)
            with acting(actor_of(caller)):
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def bearer_key(value: bytes | None) -> str | None:
    """The key of an Authorization header; None when there is none. Raises `Unauthenticated` for other forms."""
    if value is None:
        return None
    scheme, _, key = value.decode("latin-1").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key or len(key) > MAX_KEY_CHARS or not key.isascii():
        raise Unauthenticated(
            "The Authorization header isn't a bearer key.", hint="Send `Authorization: Bearer KEY`."
        )
    return key


def plain_key(value: bytes | None) -> str | None:
    """The key of an x-api-key header, as Anthropic's clients send it. Raises `Unauthenticated` for what is none."""
    if value is None:
        return None
    key = value.decode("latin-1").strip()
    if not key or len(key) > MAX_KEY_CHARS or not key.isascii():
        raise Unauthenticated("The x-api-key header holds no key.", hint="Send `x-api-key: KEY`.")
    return key


def caller_of(scope: Scope) -> Caller:
    caller: Caller = scope["state"]["caller"]
    return caller
