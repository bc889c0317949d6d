"""The pictures in Debian's Chromium: no text leaves its box or the picture, or lies on another text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.docs.pages import ROOT, pages, prose
from tests.web.conftest import browser

__all__ = ["browser"]

IMAGES = ROOT / "docs" / "images"
LEAST = 3
"""Units between a text and the right border of its box: letters of other systems are wider."""

FAULTS = """
(least) => {
  const svg = document.querySelector("svg");
  const view = svg.viewBox.baseVal;
  const texts = [...svg.querySelectorAll("text")].map((e) => ({ text: e.textContent.trim(), box: e.getBBox() }));
  const boxes = [...svg.querySelectorAll("rect:not(.bg)")].map((e) => e.getBBox());
  const right = (box) => box.x + box.width, bottom = (box) => box.y + box.height;
  const inside = (box, x, y) => x >= box.x && x <= right(box) && y >= box.y && y <= bottom(box);
  const faults = [];
  texts.forEach(({ text, box }, index) => {
    const middle = box.y + box.height / 2;
    if (box.x < 0 || right(box) > view.width - least || bottom(box) > view.height)
      faults.push(`leaves the picture: ${text}`);
    for (const other of boxes.filter((other) => inside(other, box.x + 1, middle)))
      if (right(box) > right(other) - least || bottom(box) > bottom(other) + 1)
        faults.push(`leaves its box: ${text}`);
    for (const { text: below, box: other } of texts.slice(index + 1)) {
      const wide = Math.min(right(box), right(other)) - Math.max(box.x, other.x);
      const high = Math.min(bottom(box), bottom(other)) - Math.max(box.y, other.y);
      if (wide > 1 && high > 4) faults.push(`lies on another text: ${text} / ${below}`);
    }
  });
  return faults;
}
"""


@pytest.fixture(scope="module")
def sheet(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1000, "height": 700})
    yield page
    page.close()


@pytest.mark.parametrize("picture", sorted(IMAGES.glob("*.svg")), ids=lambda picture: picture.stem)
def test_every_text_has_its_place(sheet: Page, picture: Path) -> None:
    sheet.set_content(picture.read_text(encoding="utf-8"))
    assert sheet.evaluate(FAULTS, LEAST) == []


def test_faults_are_found(sheet: Page) -> None:
    sheet.set_content(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 200 100"><rect x="10" y="10" width="60" height="20"/>'
        '<text x="12" y="25">much too long for it</text><text x="180" y="60">clipped</text>'
        '<text x="12" y="27">over it</text></svg>'
    )
    found = "\n".join(sheet.evaluate(FAULTS, LEAST))
    assert "leaves its box: much" in found
    assert "leaves the picture: clipped" in found
    assert "lies on another text: much" in found


def test_pictures_say_what_they_show_and_bring_their_ground() -> None:
    """In words for those who can't see them, and with a background: letters are dark on dark pages, too."""
    shown = "\n".join(prose(page) for page in pages())
    for picture in IMAGES.glob("*.svg"):
        text = picture.read_text(encoding="utf-8")
        assert all(part in text for part in ("<title", "<desc", 'class="bg"')), picture.name
        assert f"images/{picture.name})" in shown, f"{picture.name} is on no page"
