"""Versions of the Model Runtime Interface: negotiation, and the wire form of what changed between them (spec R6).

Plain data. Within a major version a peer that speaks 1.n speaks every 1.m below it, so two peers use the lower
minor. Over HTTP each request and reply names its version in the header `X-MRI-Version`.

    1.0   eviction replies carry `evicted_blocks`
    1.1   eviction replies carry `freed_bytes` too
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from perilune.errors import InvalidRequest
from perilune.runtime.mri import MRI_VERSION, EvictReply

SUPPORTED_VERSIONS = ("1.0", "1.1")
"""Oldest first; the last one is `MRI_VERSION`."""

VERSION_HEADER = "X-MRI-Version"

_VERSION = re.compile(r"\s*(\d{1,4})\.(\d{1,4})\s*")


def negotiate(offered: str, spoken: str = MRI_VERSION) -> str:
    """The version to use with a peer that offers `offered`: one version, or several with commas between.

    `spoken` is the newest that this side speaks. Raises `InvalidRequest` for text that is no version, and where the
    peers share no major version.
    """
    major, minor = _parse(spoken)
    shared = [min(minor, theirs[1]) for theirs in map(_parse, offered.split(",")) if theirs[0] == major]
    if not shared:
        raise InvalidRequest(
            f"MRI version {offered.strip()} has nothing in common with {spoken}.",
            hint=f"Send {VERSION_HEADER} with one of {', '.join(SUPPORTED_VERSIONS)}.",
            param=VERSION_HEADER,
        )
    return f"{major}.{max(shared)}"


def evict_reply_fields(reply: EvictReply, version: str) -> dict[str, int]:
    """An eviction reply as JSON fields for a peer of `version`."""
    fields = {"evicted_blocks": reply.evicted_blocks}
    if _parse(version) >= (1, 1):
        fields["freed_bytes"] = reply.freed_bytes
    return fields


def read_evict_reply(fields: Mapping[str, object], version: str) -> EvictReply:
    """The reply of a peer of `version`. A 1.0 reply says nothing of bytes: 0. Unknown fields are ignored.

    Raises `InvalidRequest` when a field of that version is missing, or is no count.
    """
    freed = _count(fields, "freed_bytes") if _parse(version) >= (1, 1) else 0
    return EvictReply(_count(fields, "evicted_blocks"), freed)


def _parse(version: str) -> tuple[int, int]:
    match = _VERSION.fullmatch(version)
    if match is None:
        raise InvalidRequest(
            f"{version[:40]!r} is no MRI version.",
            hint=f"Supported: {', '.join(SUPPORTED_VERSIONS)}.",
            param=VERSION_HEADER,
        )
    return int(match[1]), int(match[2])


def _count(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 0:
        raise InvalidRequest(f"An eviction reply's {name} is {value!r}, not a count.", param=name)
    return value
