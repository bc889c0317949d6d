"""What files are for and how long they stay, as callers write it: `purpose`, `expires_after`.

Knows the wire only; which purposes are read as documents is core's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from perilune.api.wire import Wire
from perilune.core import DOCUMENT_PURPOSES
from perilune.errors import InvalidRequest

BATCH = "batch"
FILE_EXTRACT = "file-extract"
USUAL_PURPOSE = "user_data"
LEAST_S, MOST_S = 3_600, 2_592_000
BATCH_LASTS_S = float(MOST_S)
"""Of a batch's input that says nothing else, as OpenAI has it."""

_REFUSED = {
    "fine-tune": "Models aren't trained here.",
    "evals": "Evaluations aren't run here.",
    "video": "Videos can't be read here yet; upload their subtitles as text.",
    "batch_output": "Only batches make such files.",
    "assistants_output": "Only assistants make such files.",
    "web_search": "Only web searches make such files.",
}


class WireExpiry(Wire):
    """`expires_after` and `output_expires_after`."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_S, le=MOST_S)


def purpose_of(value: Any) -> str:
    """Raises `InvalidRequest` for a purpose that files can't have here."""
    offered = (DOCUMENT_PURPOSES | {BATCH}) - _REFUSED.keys()
    if isinstance(value, str) and value in offered:
        return value
    known = ", ".join(sorted(offered))
    why = _REFUSED.get(value, "Wrong value for purpose.") if isinstance(value, str) else "Wrong value for purpose."
    raise InvalidRequest(why, hint=f"Use one of {known}.", param="purpose")


def lasts_s(purpose: str, expiry: WireExpiry | None) -> float | None:
    """How long a file stays; None: until somebody deletes it."""
    if expiry is not None:
        return float(expiry.seconds)
    return BATCH_LASTS_S if purpose == BATCH else None


def expiry_of_form(fields: Mapping[str, str]) -> WireExpiry | None:
    """`expires_after[anchor]` and `expires_after[seconds]` of a form. Raises `InvalidRequest`."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    number = int(seconds) if seconds and seconds.isascii() and seconds.isdigit() and len(seconds) < 9 else 0
    if anchor != "created_at" or not LEAST_S <= number <= MOST_S:
        raise InvalidRequest(
            "Wrong value for expires_after.",
            hint=f"The anchor is created_at, and the seconds are {LEAST_S:,} to {MOST_S:,}.",
            param="expires_after",
        )
    return WireExpiry(anchor="created_at", seconds=number)
