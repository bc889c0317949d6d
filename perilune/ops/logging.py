"""JSON logs, one object a line. Knows Python's logging; writes no prompt, no answer, no document, no key.

Callers pass facts as `extra={"fields": {...}}` and constant messages. Of an exception only the types and the frames
are written: messages of libraries quote what they worked on. Bearer keys that slip into a text from
elsewhere (a library, an exception) are struck out.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from datetime import UTC, datetime
from typing import TextIO

_SECRET = re.compile(
    r"(?i)\b(bearer\s+|(?:api[_-]?key|authorization)[\"']?\s*[:=]\s*[\"']?)(?!bearer\b)[^\s\"',}]+"
)


def redact(text: str) -> str:
    """`text` without the keys that follow words such as Bearer or api_key."""
    return _SECRET.sub(r"\1[removed]", text)


def where_it_failed(error: BaseException | None) -> list[str]:
    """An exception and its causes, the first cause first: each one's frames, then its type."""
    if error is None:
        return []
    frames = traceback.extract_tb(error.__traceback__)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    shown = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    system = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
    return [*where_it_failed(cause), *shown, type(error).__name__ + system]


class JsonFormatter(logging.Formatter):
    """One line of JSON: `time`, `level`, `logger`, `message`, then the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            entry.update(fields)
        if record.exc_info:
            entry["traceback"] = where_it_failed(record.exc_info[1])
        safe = {key: redact(value) if isinstance(value, str) else value for key, value in entry.items()}
        return json.dumps(safe, ensure_ascii=False, default=str)


def configure(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send every log of the process as JSON to `stream` (standard error by default). Called once, at start-up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.getLogger("uvicorn.access").disabled = True  # api.app writes its own, without query strings
