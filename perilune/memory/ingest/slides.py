"""PPTX -> one page per slide: title, text, tables, diagrams' text, the speaker's notes. Pictures are not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perilune.errors import Unreadable, UnsupportedDocument
from perilune.memory.ingest.package import MACRO_NOTE, Package, damage_told
from perilune.memory.ingest.pagination import PageText, Parsed, clean
from perilune.memory.ingest.source import Source

_A = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_P = "{http://schemas.openxmlformats.org/presentationml/2006/main}"
_R_ID = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"
_PRESENTATION = "ppt/presentation.xml"
_TITLES = {"title", "ctrTitle"}
_FURNITURE = {"dt", "ftr", "sldNum", "hdr", "sldImg"}  # dates, footers and numbers that every slide repeats


def parse(source: Source) -> Parsed:
    """Raises `UnsupportedDocument`: damaged, no slides, too many, packed like a bomb."""
    with damage_told("PPTX", "PowerPoint"):
        package = Package(source, "PPTX")
        relations = package.relations(_PRESENTATION)
        ids = [item.get(_R_ID, "") for item in package.xml(_PRESENTATION).iter(f"{_P}sldId")]
        slides = [relations[each] for each in ids if relations.get(each) in package.names]
    if not slides:
        raise UnsupportedDocument(
            "The PPTX file holds no slides.", hint="Upload a file that holds text.", why=Unreadable.NO_TEXT
        )
    if len(slides) > source.job.max_pages:
        raise UnsupportedDocument(
            f"The PPTX file has {len(slides):,} slides; the limit is {source.job.max_pages:,}.",
            hint="Split it, or raise documents.max_pages.",
            why=Unreadable.TOO_MUCH,
        )
    return Parsed(len(slides), _pages(package, slides, source.first_page))


def _pages(package: Package, slides: list[str], first: int) -> Iterator[PageText]:
    with damage_told("PPTX", "PowerPoint"):
        for number, part in enumerate(slides[first - 1 :], first):
            text = "".join(_slide(package, part)).strip("\n")
            if number == len(slides) and package.has_macros:
                text = f"{text}\n{MACRO_NOTE}"
            yield PageText(clean(f"{text}\n\n") if text else "", f"slide {number}")


def _slide(package: Package, part: str) -> Iterator[str]:
    yield from _shapes(package.xml(part))
    for target in package.relations(part).values():
        if target not in package.names:
            continue
        if target.startswith("ppt/diagrams/data"):
            yield from _paragraphs(package.xml(target))
        elif target.startswith("ppt/notesSlides/") and (notes := "".join(_shapes(package.xml(target)))).strip():
            yield f"Notes: {notes}"


def _shapes(slide: Any) -> Iterator[str]:
    """Text of shapes and tables in the order they are drawn."""
    for element in slide.iter(f"{_P}sp", f"{_A}tbl"):
        if element.tag == f"{_A}tbl":
            for row in element.iterchildren(f"{_A}tr"):
                cells = (" ".join("".join(_paragraphs(cell)).split()) for cell in row.iterchildren(f"{_A}tc"))
                yield f"{' | '.join(cells)}\n"
            continue
        placeholder = next(element.iter(f"{_P}ph"), None)
        kind = placeholder.get("type", "") if placeholder is not None else ""
        if kind not in _FURNITURE:
            text = "".join(_paragraphs(element)).strip("\n")
            yield f"# {' '.join(text.split())}\n" if kind in _TITLES and text else f"{text}\n" if text else ""


def _paragraphs(element: Any) -> Iterator[str]:
    for paragraph in element.iter(f"{_A}p"):
        text = "".join(
            (run.text or "") if run.tag == f"{_A}t" else "\n" for run in paragraph.iter(f"{_A}t", f"{_A}br")
        )
        yield f"{text}\n" if text.strip() else ""
