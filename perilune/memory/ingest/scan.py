"""A PDF page without a text layer -> what OCR reads in it.

Knows PDFium's pages. The page is rendered at 150 dpi; a page whose picture is the same as in an earlier version of
the document is not read again.
"""

from __future__ import annotations

import ctypes

import pypdfium2 as pdfium
import pypdfium2.raw as pdfium_c

from perilune.errors import UnsupportedDocument
from perilune.memory.ingest.ocr import MAX_PIXELS, MAX_SIDE_PIXELS, recognise
from perilune.memory.ingest.pagination import PageText, digest_of
from perilune.memory.ingest.source import Source

DPI = 150
_POINTS_PER_INCH = 72
_MAX_NEST = 2  # forms (PDF's groups) that are looked into for images
_MIN_DRAWN = 20


def has_picture(page: pdfium.PdfPage) -> bool:
    """Whether there is an image on the page, or enough drawing to be letters without a text layer."""
    drawn = 0
    for item in page.get_objects(max_depth=_MAX_NEST):
        if item.type == pdfium_c.FPDF_PAGEOBJ_IMAGE:
            return True
        drawn += item.type == pdfium_c.FPDF_PAGEOBJ_PATH
    return drawn >= _MIN_DRAWN


def read_scan(page: pdfium.PdfPage, number: int, source: Source) -> PageText:
    """Page `number`, rendered and recognised. Raises `UnsupportedDocument` where a limit forbids it."""
    limit = source.job.ocr_pages
    if limit == 0:
        raise UnsupportedDocument(
            "text recognition (OCR) is off", hint="Set documents.ocr_pages, or upload a file with a text layer."
        )
    pixels = largest_image(page)
    if pixels > MAX_PIXELS:
        raise UnsupportedDocument(
            f"its image has {pixels / 1e6:,.0f} million pixels; the limit is {MAX_PIXELS / 1e6:,.0f} million",
            hint=f"Scan it at {DPI} to 300 dpi.",
        )
    scale = min(DPI / _POINTS_PER_INCH, MAX_SIDE_PIXELS / max(*page.get_size(), 1.0))
    picture = page.render(scale=scale).to_numpy()
    digest = digest_of(b"scan", source.identity(number), picture.tobytes())
    if digest in source.job.known:
        return PageText("", digest=digest)
    if source.allowance.images <= 0:
        raise UnsupportedDocument(
            f"text recognition (OCR) has read {limit:,} images of this upload already",
            hint="Raise documents.ocr_pages.",
        )
    return PageText(recognise(picture, source.allowance), digest=digest)


def largest_image(page: pdfium.PdfPage) -> int:
    """Pixels of the largest image on the page: PDFium would decode it whole."""
    largest = 0
    width, height = ctypes.c_uint(), ctypes.c_uint()
    for item in page.get_objects(filter=(pdfium_c.FPDF_PAGEOBJ_IMAGE,), max_depth=_MAX_NEST):
        if pdfium_c.FPDFImageObj_GetImagePixelSize(item, width, height):
            largest = max(largest, width.value * height.value)
    return largest
