"""Errors on the wire: every failure as one OpenAI error body with the right status.

Knows HTTP and `perilune.errors`; doesn't know endpoints. The text of an unknown exception never reaches the
caller, and reaches the log only at DEBUG: such texts can quote prompts, keys and paths (CVE-2026-22778).
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.types import Send

from perilune.api.wire import Headers, send_json
from perilune.core import RateState
from perilune.errors import (
    Forbidden,
    InternalError,
    InvalidRequest,
    NotFound,
    PeriluneError,
    QuotaExceeded,
    RateLimited,
)

RETRY_AFTER_S = 2
Shape = Callable[[PeriluneError], dict[str, object]]
_RETRY = {429, 503}

log = logging.getLogger("perilune.api")


class ClientGone(Exception):
    """The client closed the connection before it had an answer; nobody is left to tell."""


class RequestTimeout(InvalidRequest):
    """The client stopped sending in the middle of its request."""

    status, code = 408, "request_timeout"


class HeadersTooLarge(InvalidRequest):
    status, code = 431, "headers_too_large"


class MethodNotAllowed(InvalidRequest):
    status, code = 405, "method_not_allowed"


class Unsupported(InvalidRequest):
    """A field that would change the answer's meaning and that this server can't honour."""

    code = "unsupported_parameter"


class ForbiddenHost(Forbidden):
    """A Host or Origin that isn't this machine: a web page trying to reach a private server."""

    code = "forbidden_host"


def from_any(error: BaseException, request_id: str) -> PeriluneError:
    """The error to show. Ours pass through; anything else is logged and becomes a bare `InternalError`."""
    if isinstance(error, PeriluneError):
        if error.status >= 500:
            log.warning("refused", extra={"fields": {"request_id": request_id, "code": error.code}})
        return error
    frames = traceback.extract_tb(error.__traceback__)
    fields = {
        "request_id": request_id,
        "exception": type(error).__name__,
        "frames": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
    }
    log.error("request failed", extra={"fields": fields})
    log.debug("request failed", exc_info=error, extra={"fields": {"request_id": request_id}})
    return InternalError(
        f"The server failed while it handled this request ({request_id}).",
        hint="The server's log has the details under that id.",
    )


def from_http(error: HTTPException, method: str) -> PeriluneError:
    """Starlette's own refusals (no such route, wrong method) in our shape."""
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        taken = "that method" if method == "OTHER" else method
        return MethodNotAllowed(f"This path doesn't take {taken}.", hint=f"Use {allowed}." if allowed else "")
    if error.status_code == 404:
        return NotFound("There is no such path here.", hint="docs/api.md lists every endpoint.")
    return InvalidRequest("The request can't be handled.", hint="docs/api.md shows each endpoint's form.")


def body(error: PeriluneError) -> dict[str, object]:
    """The OpenAI error object. The hint follows the message, because clients show only that."""
    return {
        "error": {
            "message": str(error),
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def rate_headers(rates: RateState) -> list[tuple[bytes, bytes]]:
    """OpenAI's `x-ratelimit-*` headers, of those rates that are limited."""
    found: list[tuple[bytes, bytes]] = []
    for what, limit, left, reset_s in (
        ("requests", rates.limit_requests, rates.remaining_requests, rates.reset_requests_s),
        ("tokens", rates.limit_tokens, rates.remaining_tokens, rates.reset_tokens_s),
    ):
        if limit is not None:
            values = (("limit", str(limit)), ("remaining", str(left)), ("reset", _duration(reset_s or 0.0)))
            found += [(f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, value in values]
    return found


def _duration(seconds: float) -> str:
    """As OpenAI writes one: `6m0s`, `1.5s`, `20ms`."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(round(seconds, 1), 60)
    return (f"{minutes:.0f}m" if minutes else "") + f"{rest:g}s"


async def send_error(
    send: Send,
    error: PeriluneError,
    headers: Headers = (),
    shape: Shape = body,
    rates: Callable[[RateState], list[tuple[bytes, bytes]]] = rate_headers,
) -> None:
    """One complete error response, with `retry-after` where trying again makes sense."""
    extra = list(headers)
    if error.status in _RETRY:
        wait_s = RETRY_AFTER_S if error.retry_after_s is None else max(1, math.ceil(error.retry_after_s))
        extra.append((b"retry-after", str(wait_s).encode()))
        extra.append((b"retry-after-ms", str(1000 * wait_s).encode()))
    if isinstance(error, RateLimited) and error.rates is not None:
        extra += rates(error.rates)
    if isinstance(error, QuotaExceeded):
        extra.append((b"x-should-retry", b"false"))  # what OpenAI's clients look at
    if error.status == 401:
        extra.append((b"www-authenticate", b"Bearer"))
    await send_json(send, error.status, shape(error), extra)
