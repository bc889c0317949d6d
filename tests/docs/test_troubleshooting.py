"""Every error code that a user can meet is found in the troubleshooting page."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import perilune
from perilune.errors import PeriluneError
from tests.docs.pages import ROOT


def every_code() -> set[str]:
    """The codes of all our exceptions, wherever they are defined but in the command line's own rooms."""
    for module in pkgutil.walk_packages(perilune.__path__, "perilune."):
        if module.name.split(".")[1] in ("api", "service", "errors", "memory"):
            importlib.import_module(module.name)
    found, open_classes = set(), [PeriluneError]
    while open_classes:
        one = open_classes.pop()
        found.add(one.code)
        open_classes += one.__subclasses__()
    return found


def test_every_error_code_is_explained() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    table = page[page.index("## Every error code") :]
    explained = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert every_code() - explained == set()
    assert len(explained) > 20


def test_links_lead_somewhere() -> None:
    """Of the README and of every page: the file, and its heading where one is named."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {link}" for page in pages for link in links(page) if not leads(page, link)
    ]
    assert not broken, "\n".join(broken)


def links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def leads(page: Path, link: str) -> bool:
    name, _, heading = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists():
        return False
    return not heading or heading in anchors(target.read_text(encoding="utf-8"))


def anchors(text: str) -> set[str]:
    """GitHub's names of the headings."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", title).strip().lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}
