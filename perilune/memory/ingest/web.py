"""HTML -> pages: the visible text of the body, with headings, list items and table rows on lines of their own.

Nothing is fetched and no script runs. Navigation is kept: deciding what is boilerplate loses real content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from selectolax.lexbor import LexborHTMLParser, LexborNode

from perilune.errors import UnsupportedDocument
from perilune.memory.ingest.encoding import find_encoding
from perilune.memory.ingest.pagination import Parsed, clean, paginate
from perilune.memory.ingest.protocol import Job

_HEAD_BYTES = 4_096
_CHARSET = re.compile(rb"""charset\s*=\s*["']?\s*([A-Za-z0-9_\-]+)""", re.IGNORECASE)
_SPACES = re.compile(r"\s+")
_HIDDEN = {"script", "style", "noscript", "template", "svg", "head", "iframe", "object", "select"}
_INLINE_TAGS = (
    "a abbr acronym b bdi bdo big cite code data del dfn em font i img ins kbd label mark q rp rt ruby s samp "
    "small span strike strong sub sup time tt u var wbr"
)
_INLINE = frozenset(_INLINE_TAGS.split())
_HEADINGS = {f"h{level}": f"\n{'#' * level} " for level in range(1, 7)}
_OPENS = _HEADINGS | {"li": "\n- ", "p": "\n\n", "table": "\n\n", "tr": "\n", "pre": "\n\n"}
_CLOSES = {"p": "\n\n", "table": "\n\n", "pre": "\n\n", "td": " | ", "th": " | ", "tr": "\n", "li": "\n"}


def parse(job: Job) -> Parsed:
    """Raises `UnsupportedDocument` for binary data and for a page without text."""
    tree = LexborHTMLParser(_decode(Path(job.path)))
    title = tree.css_first("title")
    text = tidy("".join(_visible(tree.body))) if tree.body is not None else ""
    if not text:
        raise UnsupportedDocument(
            "The HTML file shows no text.", hint="If a script builds the page, save it as PDF in a browser instead."
        )
    heading = _SPACES.sub(" ", title.text()).strip() if title is not None else ""
    if heading and heading not in text[:500]:
        text = f"{heading}\n\n{text}"
    return Parsed(None, islice(paginate([text]), job.first_page - 1, None))


def _decode(path: Path) -> str:
    """The declared encoding where it fits, else the one found."""
    data = path.read_bytes()
    declared = _CHARSET.search(data[:_HEAD_BYTES])
    found = find_encoding(path)
    if declared is not None and not found.startswith("utf"):
        name = declared[1].decode().lower()
        name = "gb18030" if name in ("gb2312", "gbk") else name
        try:
            return data.decode(name)
        except (LookupError, UnicodeDecodeError):
            return data.decode(found, errors="replace")
    return data.decode(found, errors="replace")


def _visible(body: LexborNode) -> Iterator[str]:
    """Text and line ends in document order. No recursion: pages may nest as deep as they like."""
    node: LexborNode | None = body
    preformatted = 0
    while node is not None:
        tag = node.tag or ""
        child = None if tag in _HIDDEN else node.child
        if tag == "-text":
            text = node.text_content or ""
            yield text if preformatted else _SPACES.sub(" ", text)
        elif tag in ("br", "hr"):
            yield "\n"
        elif tag not in _HIDDEN and tag not in _INLINE:
            yield _OPENS.get(tag, "" if tag in ("td", "th") else "\n")
        if child is not None:
            preformatted += tag == "pre"
            node = child
            continue
        while node is not None and node.next is None:
            node = None if node.parent is None or node == body else node.parent
            if node is None or node == body:
                return
            parent_tag = node.tag or ""
            preformatted -= parent_tag == "pre"
            if parent_tag not in _INLINE:
                yield _CLOSES.get(parent_tag, "\n")
        node = node.next if node is not None else None


def tidy(text: str) -> str:
    """No space at line ends, no cell mark at a row's end, at most one empty line in a row."""
    lines = (line.rstrip().removesuffix(" |").rstrip() for line in clean(text).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
