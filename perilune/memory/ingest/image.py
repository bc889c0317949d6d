"""Image files -> the text in them, by OCR: PNG, JPEG, GIF, TIFF (every page), WebP, BMP.

An image's size is checked before it is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from perilune.errors import Unreadable, UnsupportedDocument
from perilune.memory.ingest.ocr import MAX_PIXELS, MAX_SIDE_PIXELS, recognise
from perilune.memory.ingest.pagination import PageText, Parsed, digest_of
from perilune.memory.ingest.source import Source

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image


def parse(source: Source) -> Parsed:
    """Raises `UnsupportedDocument`: damaged, too large, too many frames, no text, OCR off or used up."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # its check can't say what to do; ours can, and is stricter
    try:
        image = Image.open(source.open(), formats=["PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"])
        frames = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
    except (OSError, ValueError, SyntaxError) as error:
        raise _damaged(error) from None
    if frames > source.job.max_pages:
        raise UnsupportedDocument(
            f"The image has {frames:,} pages; the limit is {source.job.max_pages:,}.",
            hint="Split it, or raise documents.max_pages.",
            why=Unreadable.TOO_MUCH,
        )
    return Parsed(frames, islice(_pages(source, image, frames), source.first_page - 1, None))


def _pages(source: Source, image: Image.Image, frames: int) -> Iterator[PageText]:
    found = False
    content = source.read()
    for frame in range(frames):
        digest = digest_of(b"image", source.identity(frame + 1), frame.to_bytes(4), content)
        anchor = f"page {frame + 1}" if frames > 1 else ""
        if digest in source.job.known:
            found = True
            yield PageText("", anchor, digest)
            continue
        text = _text(source, image, frame)
        found = found or bool(text)
        yield PageText(text, anchor, digest)
    if not found:
        raise UnsupportedDocument(
            "No text was found in this image.",
            hint="Upload a sharper one, or a document with text.",
            why=Unreadable.NO_TEXT,
        )


def _text(source: Source, image: Image.Image, frame: int) -> str:
    if source.allowance.images <= 0:
        raise UnsupportedDocument(
            f"Text recognition (OCR) is off, or has read {source.job.ocr_pages:,} images of this upload already.",
            hint="Raise documents.ocr_pages.",
            why=Unreadable.SCAN,
        )
    try:
        image.seek(frame)
        pixels = _pixels(image)
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise _damaged(error) from None
    return recognise(pixels, source.allowance)


def _pixels(image: Image.Image) -> npt.NDArray[np.uint8]:
    """The image upright on white, made small enough, as height x width x BGR."""
    import numpy as np
    from PIL import Image, ImageOps

    width, height = image.size
    image.draft("RGB", (MAX_SIDE_PIXELS, MAX_SIDE_PIXELS))  # a JPEG is decoded at a fraction of its size
    if image.width * image.height > MAX_PIXELS:
        raise UnsupportedDocument(
            f"The image has {width:,} x {height:,} pixels; the limit is {MAX_PIXELS / 1e6:,.0f} million.",
            hint="Make it smaller (2,000 pixels on the longer side are enough for a page), or cut it.",
            why=Unreadable.TOO_MUCH,
        )
    small = image.copy()
    if small.mode in ("1", "I;16", "I", "F"):
        small = small.convert("L")
    small.thumbnail((MAX_SIDE_PIXELS, MAX_SIDE_PIXELS))
    small = ImageOps.exif_transpose(small)
    if small.has_transparency_data:
        white = Image.new("RGBA", small.size, "white")
        small = Image.alpha_composite(white, small.convert("RGBA"))
    return np.ascontiguousarray(np.asarray(small.convert("RGB"))[:, :, ::-1])


def _damaged(error: Exception) -> UnsupportedDocument:
    from PIL import UnidentifiedImageError

    # That error's own words are the path of the file, which is the server's business.
    reason = "" if isinstance(error, UnidentifiedImageError) else f" ({str(error)[:100]})"
    return UnsupportedDocument(
        f"The image is damaged or of an unknown kind{reason}.",
        hint="Save it again as PNG and upload that.",
        why=Unreadable.DAMAGED,
    )
