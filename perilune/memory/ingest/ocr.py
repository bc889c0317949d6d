"""Pixels -> text: PP-OCR's models through RapidOCR, whose wheel carries them; English and Chinese. One thread.

Loads a second of libraries and some hundred MB when the first image is read, and only in a parser process.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from perilune.errors import Unreadable, UnsupportedDocument
from perilune.memory.ingest.layout import Box, text_of
from perilune.memory.ingest.pagination import clean
from perilune.memory.ingest.source import Allowance

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_SIDE_PIXELS = 2_000
"""Larger images are made smaller; an A4 page at 150 dpi has 1,754."""

MAX_PIXELS = 100_000_000
"""Larger images are not decoded: this one takes 400 MB."""

_MIN_SCORE = 0.5


def recognise(pixels: npt.NDArray[np.uint8], allowance: Allowance) -> str:
    """Text in reading order, lines ended; empty where there is none. `pixels` are height x width x 3, BGR.

    Takes one image of the allowance; the caller asks first whether one is left.
    """
    with allowance.image():
        found = _engine()(pixels)
    if found.boxes is None or found.txts is None:
        return ""
    boxes = []
    for corners, text, score in zip(found.boxes.tolist(), found.txts, found.scores, strict=True):
        xs, ys = [x for x, _ in corners], [y for _, y in corners]
        if score >= _MIN_SCORE and text.strip():
            boxes.append(Box(min(xs), min(ys), max(xs), max(ys), clean(text).strip()))
    text = text_of(boxes)
    return f"{text}\n" if text else ""


@cache
def _engine() -> Any:
    try:
        import onnxruntime
        from rapidocr import RapidOCR
    except ImportError as error:
        raise UnsupportedDocument(
            f"Text recognition (OCR) can't be loaded ({error}).",
            hint="Install Perilune again, or upload a file with a text layer.",
            why=Unreadable.FAILED,
        ) from None
    onnxruntime.set_default_logger_severity(4)  # libraries write nothing: it could quote the document
    engine = "EngineConfig.onnxruntime"
    return RapidOCR(
        params={
            "Global.log_level": "critical",
            "Global.use_cls": False,  # lines upside down are rare, and the check costs a model's run per line
            "Global.max_side_len": MAX_SIDE_PIXELS,
            f"{engine}.intra_op_num_threads": 1,
            f"{engine}.inter_op_num_threads": 1,
        }
    )
