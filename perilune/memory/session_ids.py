"""What a session may be called. Callers choose the ids; a file's id can't be one, because both name sources."""

from __future__ import annotations

import hashlib

MAX_SESSION_ID_CHARS = 64
SESSION_ID_FORM = (
    f"has 1 to {MAX_SESSION_ID_CHARS} printable characters, not only blanks, and does not begin with `file-`"
)


def is_session_id(text: str) -> bool:
    """Whether `text` may name a session."""
    return (
        0 < len(text) <= MAX_SESSION_ID_CHARS
        and text.isprintable()
        and not text.isspace()
        and not text.startswith("file-")
    )


def session_owner(tenant: str, session_id: str) -> str:
    """Who owns KV that was made of a session, and what the audit calls it: callers' ids may say too much."""
    return "session-" + hashlib.sha256(f"{tenant}\0{session_id}".encode()).hexdigest()[:24]


def profile_owner(tenant: str) -> str:
    """Who owns KV that was made of a user's profile."""
    return "profile-" + hashlib.sha256(tenant.encode()).hexdigest()[:24]


def tenant_owner(tenant: str) -> str:
    """Who owns a tenant's KV that was made of no document and no session."""
    return "tenant-" + hashlib.sha256(tenant.encode()).hexdigest()[:24]
