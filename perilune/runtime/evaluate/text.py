"""Text to evaluate on: the user's own files, or one that every Python installation has.

Knows files and their encoding, not models. The default is Python's own language reference as its `help()` shows it
(`pydoc_data`, PSF licence): about 700 kB of English prose and code, the same for everyone with the same Python.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perilune.errors import InvalidRequest

MAX_TEXT_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class EvalText:
    """A text with its name and the start of its SHA-256, so that figures can be compared."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def default_text() -> EvalText:
    """Python's language reference, its topics in alphabetical order."""
    from pydoc_data.topics import topics

    return EvalText("Python language reference", "\n\n".join(topics[name] for name in sorted(topics)))


def read_text(paths: Sequence[Path]) -> EvalText:
    """UTF-8 files one behind the other; without any, the default. Raises `InvalidRequest` for unreadable ones."""
    if not paths:
        return default_text()
    parts = []
    for path in paths:
        try:
            if path.stat().st_size > MAX_TEXT_BYTES:
                raise InvalidRequest(f"{path.name} is larger than 64 MiB.", hint="Give a part of it.")
            parts.append(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidRequest(f"{path.name} can't be read: {error.strerror}.", hint="Check the path.") from None
        except UnicodeDecodeError:
            raise InvalidRequest(
                f"{path.name} is not UTF-8 text.", hint="Give a plain text file (of a PDF, its extracted text)."
            ) from None
    return EvalText(", ".join(path.name for path in paths), "\n\n".join(parts))
