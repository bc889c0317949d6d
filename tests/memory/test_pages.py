"""A page as it is shown: its text lies where citations say; its picture is drawn in the sandbox, and bounded."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from perilune.core import FileStatus
from perilune.errors import NotFound, UnsupportedDocument
from perilune.memory.ingest.picture import MAX_HEIGHT_PIXELS
from perilune.memory.library import Library
from perilune.memory.page_images import PageImages
from perilune.memory.store import Store
from perilune.service.passages import citation, joined
from tests.memory.conftest import Manual, add, ingest
from tests.memory.test_sandbox import library_with


def opened(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png), formats=["PNG"])


@pytest.mark.parametrize("name", ["octave", "debian_zh"])
def test_citations_lie_on_the_page_that_they_name(name: str, request: pytest.FixtureRequest) -> None:
    manual: Manual = request.getfixturevalue(name)
    file_id, seen = manual.record.file_id, 0
    for question in ("How do I transpose a matrix?", "如何安装软件包?", "sparse eigenvalues", "内核"):
        found = manual.library.search("local", [file_id], question, 8)
        for passage in joined(found, [file_id]):
            cited = citation(passage, {})
            view = manual.library.page("local", file_id, cited.page)
            start, end = cited.start - view.page.start, cited.end - view.page.start
            assert 0 <= start < end <= len(view.page.text)
            assert view.page.text[start:end].strip().startswith(cited.quote.removesuffix("…")[:400])
            assert view.pages == manual.record.pages_parsed
            assert view.drawable
            seen += 1
    assert seen > 4, manual.record


def test_a_page_of_a_real_manual_is_drawn_and_kept(octave: Manual) -> None:
    file_id = octave.record.file_id
    begun_s = time.monotonic()
    first = octave.library.page_image("local", file_id, 40, 800)
    drawn_s = time.monotonic() - begun_s
    picture = opened(first)
    assert picture.width in (799, 800, 801)
    assert 1.2 < picture.height / picture.width < 1.5
    darkest, lightest = picture.convert("L").getextrema()
    assert darkest < 64 < 240 < lightest
    begun_s = time.monotonic()
    assert octave.library.page_image("local", file_id, 40, 800) == first
    assert time.monotonic() - begun_s < max(0.05, drawn_s / 2)
    assert octave.library.page_image("local", file_id, 41, 800) != first
    with pytest.raises(NotFound):
        octave.library.page("local", file_id, octave.record.pages_parsed + 1)
    with pytest.raises(NotFound):
        octave.library.page_image("other", file_id, 1, 800)


def test_images_are_drawn_upright_and_strips_stay_small(library: Library) -> None:
    scan = Image.new("RGB", (600, 900), "white")
    ImageDraw.Draw(scan).text((50, 100), "HELLO WORLD", fill="black", font_size=60)
    data = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    scan.save(data, "JPEG", exif=exif)
    record = add(library, data.getvalue(), "scan.jpg")
    images = PageImages(library._parsers, library._settings)
    path = library._blobs.path("local", record.file_id)
    turned = opened(images.get(record.file_id, path, record.filename, 1, 450))
    assert turned.size == (450, 300)
    strip = io.BytesIO()
    Image.new("L", (10, 20_000)).save(strip, "PNG")
    record = add(library, strip.getvalue(), "strip.png")
    drawn = opened(images.get(record.file_id, library._blobs.path("local", record.file_id), "strip.png", 1, 2_000))
    assert drawn.height == MAX_HEIGHT_PIXELS


def test_what_cannot_be_drawn(library: Library) -> None:
    notes = ingest(library, b"Only words.\n")
    assert not library.page("local", notes.file_id, 1).drawable
    with pytest.raises(NotFound, match="no picture"):
        library.page_image("local", notes.file_id, 1, 500)
    broken = add(library, b"%PDF-1.7 nothing behind it", "broken.pdf")
    path = library._blobs.path("local", broken.file_id)
    images = PageImages(library._parsers, library._settings)
    for page in (1, 2):
        with pytest.raises(UnsupportedDocument):
            images.get(broken.file_id, path, broken.filename, page, 500)
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    large = add(library, bomb.getvalue(), "bomb.png")
    with pytest.raises(UnsupportedDocument, match="too large"):
        images.get(large.file_id, library._blobs.path("local", large.file_id), "bomb.png", 1, 500)


@pytest.mark.parametrize("mode", ["abort", "junk"])
def test_a_parser_that_fails_harms_nobody(mode: str, store: Store, tmp_path: Path) -> None:
    library = library_with(mode, store, tmp_path)
    record = add(library, b"%PDF-1.7", "a.pdf")
    images = PageImages(library._parsers, library._settings)
    with pytest.raises(UnsupportedDocument):
        images.get(record.file_id, library._blobs.path("local", record.file_id), "a.pdf", 1, 500)


def test_pictures_go_with_their_file_and_are_bounded(library: Library) -> None:
    scan = Image.effect_noise((300, 300), 100)
    data = io.BytesIO()
    scan.save(data, "PNG")
    files = [add(library, data.getvalue() + bytes([number]), f"{number}.png") for number in range(3)]
    images = PageImages(library._parsers, library._settings)
    for record in files:
        png = images.get(record.file_id, library._blobs.path("local", record.file_id), record.filename, 1, 300)
        images._kept_bytes = len(png) * 3 // 2
    assert [key[0] for key in images._kept] == [files[2].file_id]
    library._images = images
    library.delete_file("local", files[2].file_id)
    assert not images._kept
    assert files[0].status is FileStatus.UPLOADED
