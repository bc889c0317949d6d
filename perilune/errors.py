"""The exception tree. Each error knows its HTTP status, its stable code, its exit code and what to do next.

`message` says what happened and why; `hint` says what to do. Both are written for the person who asked and
never carry internals, prompts, keys or paths of the server. Unknown exceptions become `InternalError`.
"""

from __future__ import annotations

from enum import StrEnum

from perilune.core import RateState


class PeriluneError(Exception):
    """Base of every error a user can meet."""

    status = 500
    code = "internal_error"
    type: str = "server_error"
    exit_code = 1

    def __init__(
        self, message: str, *, hint: str = "", param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param
        self.retry_after_s = retry_after_s  # when trying again may help; None: not known

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class InternalError(PeriluneError):
    """Something of ours failed. The log has the details under the request id."""


class InvalidRequest(PeriluneError):
    status, code, type, exit_code = 400, "invalid_request", "invalid_request_error", 2


class ContextTooLong(InvalidRequest):
    """The prompt can't be served under the pinned policy; the message names the limit."""

    code, exit_code = "context_length_exceeded", 5


class ConfigError(InvalidRequest):
    code = "invalid_configuration"


class Unauthenticated(PeriluneError):
    status, code, type, exit_code = 401, "invalid_api_key", "authentication_error", 4


class Forbidden(PeriluneError):
    status, code, type, exit_code = 403, "forbidden", "permission_denied_error", 4


class KeptHere(Forbidden):
    """Text that is local-only would have left this machine."""

    code = "local_only"


class NotFound(PeriluneError):
    status, code, type, exit_code = 404, "not_found", "invalid_request_error", 1


class ModelNotFound(NotFound):
    code = "model_not_found"


class Conflict(PeriluneError):
    """The resource is in use: a port, a KV folder, a file that is being changed."""

    status, code, type, exit_code = 409, "conflict", "invalid_request_error", 1


class TooLarge(PeriluneError):
    status, code, type, exit_code = 413, "too_large", "invalid_request_error", 5


class Unreadable(StrEnum):
    """Why a document can't be read, as far as a program can tell it apart: for texts in other languages."""

    LOCKED = "locked"  # by a password or copy protection
    DAMAGED = "damaged"  # or cut off
    NO_TEXT = "no_text"
    SCAN = "scan"  # images, which may not be recognised
    UNKNOWN_KIND = "unknown_kind"
    TOO_MUCH = "too_much"  # pages, text, computing or memory
    FAILED = "failed"  # something of ours did


class UnsupportedDocument(InvalidRequest):
    """A file that can't be read: encrypted, truncated, image-only, empty, of an unknown kind. `why` says which of
    these where that is known."""

    status, code = 422, "unsupported_document"

    def __init__(
        self, message: str, *, hint: str = "", param: str | None = None, why: Unreadable | None = None
    ) -> None:
        super().__init__(message, hint=hint, param=param)
        self.why = why


class UnsupportedModel(InvalidRequest):
    """A model file that can't be loaded: broken, an unknown architecture, an unknown quantisation."""

    code, exit_code = "unsupported_model", 1


class Overloaded(PeriluneError):
    """Refused at once: no KV, no queue slot, or the deadline can't be met."""

    status, code, type, exit_code = 503, "overloaded", "server_error", 1


class EngineBusy(Overloaded):
    """The queue is full: the 429 that says nothing of the caller's own limits."""

    status, code, type = 429, "engine_overloaded", "overloaded"


class RateLimited(PeriluneError):
    """A key's requests or tokens a minute, or its requests at once, are used. `kind` is requests or tokens."""

    status, code, exit_code = 429, "rate_limit_exceeded", 1

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        kind: str = "requests",
        retry_after_s: float | None = None,
        rates: RateState | None = None,
    ) -> None:
        super().__init__(message, hint=hint, retry_after_s=retry_after_s)
        self.type = kind
        self.rates = rates


class QuotaExceeded(PeriluneError):
    """A key's tokens of the day or budget of the month are used: trying again soon is in vain."""

    status, code, type, exit_code = 429, "insufficient_quota", "insufficient_quota", 1


class Unreachable(PeriluneError):
    """A download source, a server or a backend did not answer."""

    status, code, exit_code = 502, "unreachable", 3


class IntegrityError(PeriluneError):
    """Bytes that don't match their hash."""

    code = "integrity_error"


class InvalidStateError(PeriluneError):
    """A call that the MRI forbids in the runtime's present state (spec R6)."""

    status, code = 409, "invalid_state"
