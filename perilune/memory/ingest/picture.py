"""One page of a PDF or an image -> a PNG of a given width, as a person sees it. Runs in a parser process.

Knows pixels, no text. Sizes are checked before anything is decoded.
"""

from __future__ import annotations

import io

from PIL import Image, ImageOps

from perilune.errors import UnsupportedDocument
from perilune.memory.ingest.ocr import MAX_PIXELS
from perilune.memory.ingest.sniff import kind_of
from perilune.memory.ingest.source import Source

MAX_HEIGHT_PIXELS = 4_000
"""Of the picture: a page that is a very long strip becomes narrower than was asked."""


def draw(source: Source, width: int) -> bytes:
    """Page `source.first_page`, `width` pixels wide or less. Raises `UnsupportedDocument`, also for other kinds."""
    kind = kind_of(source)
    if kind not in ("pdf", "image"):
        raise UnsupportedDocument("Pages of this kind of file have no picture.", hint="Read the page's text.")
    try:
        picture = _of_pdf(source, width) if kind == "pdf" else _of_image(source, width)
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise _damaged() from error
    data = io.BytesIO()
    picture.save(data, "PNG")
    return data.getvalue()


def _of_pdf(source: Source, width: int) -> Image.Image:
    import pypdfium2 as pdfium

    from perilune.memory.ingest.scan import largest_image

    try:
        document = pdfium.PdfDocument(source.job.path)
        page = document[source.first_page - 1]
        if largest_image(page) > MAX_PIXELS:
            raise UnsupportedDocument("The page's image is too large to be drawn.", hint="Read the page's text.")
        wide, high = page.get_size()
        scale = min(width / max(wide, 1.0), MAX_HEIGHT_PIXELS / max(high, 1.0))
        drawn: Image.Image = page.render(scale=scale).to_pil()
    except (pdfium.PdfiumError, IndexError):
        raise _damaged() from None
    return drawn


def _of_image(source: Source, width: int) -> Image.Image:
    Image.MAX_IMAGE_PIXELS = None  # its check can't say what to do; ours can, and is stricter
    image: Image.Image = Image.open(source.open(), formats=["PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"])
    image.seek(source.first_page - 1)
    image.draft("RGB", (2 * width, MAX_HEIGHT_PIXELS))  # a JPEG is decoded at a fraction of its size
    if image.width * image.height > MAX_PIXELS:
        raise UnsupportedDocument("The image is too large to be drawn.", hint="Read the page's text.")
    small = ImageOps.exif_transpose(image.convert("L" if image.mode in ("1", "I;16", "I", "F") else "RGB"))
    small.thumbnail((width, MAX_HEIGHT_PIXELS))
    return small


def _damaged() -> UnsupportedDocument:
    return UnsupportedDocument("The page can't be drawn; it is probably damaged.", hint="Read the page's text.")
