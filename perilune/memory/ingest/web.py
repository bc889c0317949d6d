"""HTML -> pages: the visible text of the body, with headings, list items and table rows on lines of their own.

Nothing is fetched and no script runs. Navigation is kept: deciding what is boilerplate loses real content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from selectolax.lexbor import LexborHTMLParser, LexborNode

from perilune.errors import Unreadable, UnsupportedDocument
from perilune.memory.ingest.encoding import find_encoding
from perilune.memory.ingest.pagination import Parsed, clean, pages_of
from perilune.memory.ingest.source import Source

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
_OPENS = _HEADINGS | {
    "li": "\n- ",
    "p": "\n\n",
    "table": "\n\n",
    "tr": "\n",
    "pre": "\n\n",
    "td": "",
    "th": "",
    "br": "",
    "hr": "",
}
_CLOSES = {"p": "\n\n", "table": "\n\n", "pre": "\n\n", "td": " | ", "th": " | ", "tr": "", "li": ""}


def parse(source: Source) -> Parsed:
    """Raises `UnsupportedDocument` for binary data and for a page without text."""
    heading, text = read_html(_decode(source))
    if not text:
        raise UnsupportedDocument(
            "The HTML file shows no text.",
            hint="If a script builds the page, save it as PDF in a browser instead.",
            why=Unreadable.NO_TEXT,
        )
    if heading and heading not in text[:500]:
        text = f"{heading}\n\n{text}"
    return Parsed(None, pages_of([text], source.first_page))


def read_html(html: str) -> tuple[str, str]:
    """(title, visible text); either may be empty."""
    tree = LexborHTMLParser(html)
    title = tree.css_first("title")
    text = tidy("".join(_visible(tree.body))) if tree.body is not None else ""
    return _SPACES.sub(" ", title.text()).strip() if title is not None else "", text


def _decode(source: Source) -> str:
    """The declared encoding where it fits, else the one found."""
    data = source.read()
    declared = _CHARSET.search(data[:_HEAD_BYTES])
    found = find_encoding(source)
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
    node, depth, preformatted = body, 0, 0
    while True:
        tag = node.tag or ""
        child = None if tag in _HIDDEN else node.child
        if tag == "-text":
            text = node.text_content or ""
            yield text if preformatted else _SPACES.sub(" ", text)
        else:
            yield _border(tag, _OPENS)
        if child is not None:
            preformatted += tag == "pre"
            node, depth = child, depth + 1
            continue
        yield _border(tag, _CLOSES)
        while depth > 0 and node.next is None:
            parent = node.parent
            if parent is None:
                return
            node, depth = parent, depth - 1
            tag = node.tag or ""
            preformatted -= tag == "pre"
            yield _border(tag, _CLOSES)
        following = node.next
        if depth == 0 or following is None:
            return
        node = following


def _border(tag: str, borders: dict[str, str]) -> str:
    """What an element's begin or end adds to the text: by default a block stands on lines of its own."""
    if tag in _INLINE or tag in _HIDDEN or tag.startswith(("-", "!")):
        return ""
    return borders.get(tag, "\n")


def tidy(text: str) -> str:
    """No space at line ends, no cell mark at a row's end, at most one empty line in a row."""
    lines = (line.rstrip().removesuffix(" |").rstrip() for line in clean(text).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
