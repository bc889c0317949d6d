"""The words of the system: classes, policies, kinds of plans, reasons to end."""

from __future__ import annotations

from enum import IntEnum, StrEnum

BLOCK_TOKENS = 32
"""Tokens in one physical KV block: the unit of allocation, hashing and tier moves."""

DEFAULT_TENANT = "local"
"""The tenant of every caller on loopback while no keys exist."""


class ServiceClass(IntEnum):
    """Scheduling class (spec E2). Lower runs first."""

    P0_INTERACTIVE = 0
    P1_DOCUMENT = 1
    P2_BATCH = 2


class KVPolicy(StrEnum):
    """How a sequence's KV is kept (spec R4). KV of the two is never exchanged."""

    FULL = "full"  # every token at full precision
    TIERED = "tiered"  # recent tokens at full precision, older ones INT8 in RAM and on disk


class ContextPolicy(StrEnum):
    """What a caller allows the planner to do with the offered context (spec C3)."""

    AUTO = "auto"
    FULL = "full"
    REFINED = "refined"


class PlanKind(StrEnum):
    """The ways of answering a request (spec C2)."""

    WARM = "warm"  # the KV of the whole context is in some tier
    RESUME = "resume"  # a cached prefix, prefill the rest
    FULL = "full"  # prefill everything
    REFINED = "refined"  # retrieved passages within a token budget
    FALLBACK = "fallback"  # another model or backend
    LATER = "later"  # queue, batch or refuse
    CACHED = "cached"  # an answer that was given before


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"  # of a choice whose answer is calls; engines know it not
    CANCELLED = "cancelled"
    ERROR = "error"
    EXPIRED = "expired"  # its time to live ended before its first token
