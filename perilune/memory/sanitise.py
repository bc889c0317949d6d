"""Names that callers choose, made safe to show. They are never used as paths.

Knows characters only: control characters and marks that reverse the reading direction are removed, because
they can make a name look like another.
"""

from __future__ import annotations

import unicodedata

_MAX_NAME_CHARS = 255
_MAX_LABEL_CHARS = 64
_DECEPTIVE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def filename(name: str) -> str:
    """A display name of at most 255 characters; the end is kept, it has the extension.

    A relative path keeps its folders, so that two files of the same name can be told apart; an absolute one
    doesn't: it would tell about the caller's machine.
    """
    path = _visible(name).replace("\\", "/")
    parts = [part for part in path.split("/") if part.strip(" .")]
    if path.startswith("/") or path[1:3] == ":/":
        parts = parts[-1:]
    return "/".join(parts)[-_MAX_NAME_CHARS:] or "file"


def label(text: str) -> str:
    """A short label such as a file's purpose."""
    return _visible(text)[:_MAX_LABEL_CHARS]


def _visible(text: str) -> str:
    return "".join(char for char in text if unicodedata.category(char) not in _DECEPTIVE)
