"""What happens with a field of a request that this server doesn't honour, in every dialect: the one written rule.

Refused (400, `unsupported_parameter`): fields that would change the answer, or what is answered, unless their value
changes nothing. Ignored: bookkeeping, and names that no table here knows; the response says which, in the header
`perilune-ignored-fields`. Nothing is changed silently. docs/api.md shows these tables; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from perilune.api.errors import Unsupported
from perilune.api.wire import Wire
from perilune.core import ContextPolicy, Request

IGNORED_HEADER = b"perilune-ignored-fields"
_MOST_NAMED = 16

Neutral = tuple[Any, ...]

_NONE: Neutral = (None,)

REFUSED: Mapping[str, Mapping[str, Neutral]] = {
    "chat": {
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "audio": _NONE,
        "modalities": (None, [], ["text"]),
        "moderation": _NONE,
        "prediction": _NONE,
        "guided_json": _NONE,
        "guided_regex": _NONE,
        "guided_choice": _NONE,
        "guided_grammar": _NONE,
        "stop_token_ids": (None, []),
        "bad_words": (None, []),
        "min_tokens": (None, 0),
        "best_of": (None, 1),
        "echo": (None, False),
        "use_beam_search": (None, False),
        "prompt_logprobs": (None, False),
        "chat_template": _NONE,
        "continue_final_message": (None, False),
    },
    "responses": {
        "prompt": _NONE,
        "image": _NONE,
        "moderation": _NONE,
        "max_tool_calls": _NONE,
    },
    "messages": {
        "container": _NONE,
        "mcp_servers": (None, []),
        "context_management": _NONE,
        "compaction": _NONE,
        "thread": _NONE,
        "fallbacks": (None, []),
        "fallback_credit_token": _NONE,
        "diagnostics": _NONE,
    },
    "completions": {
        "suffix": (None, ""),
        "use_beam_search": (None, False),
        "prompt_logprobs": (None, False),
        "stop_token_ids": (None, []),
        "bad_words": (None, []),
        "min_tokens": (None, 0),
    },
    "embeddings": {},
}
"""Dialect -> field -> the values that change nothing and are accepted."""

IGNORED: Mapping[str, Collection[str]] = {
    "chat": (
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "access_programs",
    ),
    "responses": (
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "background_options",
        "access_programs",
    ),
    "messages": (
        "metadata",
        "cache_control",
        "inference_geo",
        "speed",
        "service_tier",
        "user_profile_id",
        "workspace_id",
        "billing_policy",
        "betas",
    ),
    "completions": ("user",),
    "embeddings": ("user",),
}
"""Dialect -> fields that are known and change nothing here. Our cache needs no keys and no marks."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class WireThinking(Wire):
    """Anthropic's and Moonshot's. A budget isn't kept to: it bounds nothing that `max_tokens` doesn't."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: str | None = Field(None, max_length=64)
    keep: str | None = Field(None, max_length=64)


class WireCacheOptions(Wire):
    """`mode` and `ttl` change nothing: every prompt's KV is cached, for as long as there is room."""

    prewarm: bool | None = None
    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = Field(None, max_length=16)
    comparison_response_id: str | None = Field(None, max_length=64)


def check_fields(dialect: str, raw: Mapping[str, Any]) -> None:
    """Raises `Unsupported` for the first field that would change the answer and isn't honoured."""
    for field, neutral in REFUSED[dialect].items():
        if field in raw and raw[field] not in neutral:
            raise Unsupported(f"{field} isn't supported by this server.", hint="Leave it out.", param=field)


def ignored_fields(raw: Mapping[str, Any], read: Collection[str], dialect: str) -> tuple[str, ...]:
    """The names of a body's fields that no table knows, where they hold something."""
    known = {*read, *REFUSED[dialect], *IGNORED[dialect]}
    names = (name for name, value in raw.items() if name not in known and value is not None)
    return tuple(name for name in names if name.isascii() and name.isidentifier())[:_MOST_NAMED]


def ignored_header(names: Collection[str]) -> list[tuple[bytes, bytes]]:
    return [(IGNORED_HEADER, ", ".join(names).encode())] if names else []


def prewarmed(request: Request, options: WireCacheOptions | None, timeout_s: float) -> Request:
    """The request, whose prompt is only to be computed where the options say so: all of it, however long it
    takes."""
    if options is None or not options.prewarm:
        return request
    policy = ContextPolicy.FULL if request.context_policy is ContextPolicy.AUTO else request.context_policy
    return replace(request, prewarm=True, context_policy=policy, n=1, deadline_s=request.deadline_s or timeout_s)
