"""What an answer of Anthropic's Messages may cite of the request itself: documents that are sent as text or blocks,
and search results.

Knows the dialect's places: characters of a text, blocks of a document or of a search result. Files are cited by the
service, by page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from perilune.memory.sentences import MAX_TEXT_CHARS, sentences
from perilune.service.attribution import Placer

MAX_UNITS = 2_000
"""Sentences and blocks that may be cited: they are looked at while others wait. Long documents are uploaded."""


@dataclass(frozen=True, slots=True)
class Quotable:
    """Something that may be cited: `where` is the citation, `text` what the dialect calls `cited_text`."""

    text: str
    where: dict[str, Any]

    def citation(self) -> dict[str, Any]:
        return {**self.where, "cited_text": self.text}


@dataclass(slots=True)
class Sources:
    """Collected while a request is read. `documents` are the files' ids by document index; None: not a file."""

    documents: list[str | None] = field(default_factory=list)
    quotable: list[Quotable] = field(default_factory=list)
    search_results: int = 0

    def add_file(self, file_id: str) -> None:
        self.documents.append(file_id)

    def add_text(self, text: str, title: str | None, cited: bool) -> None:
        """A document of one text: characters are cited."""
        place = {"type": "char_location", "document_index": len(self.documents), "document_title": title}
        self.documents.append(None)
        for start, end in islice(_sentences(text), MAX_UNITS) if cited else ():
            self._quote(text[start:end], {**place, "start_char_index": start, "end_char_index": end})

    def add_blocks(self, texts: Sequence[str], title: str | None, cited: bool) -> None:
        """A document of blocks: whole blocks are cited."""
        place = {"type": "content_block_location", "document_index": len(self.documents), "document_title": title}
        self.documents.append(None)
        for at, text in enumerate(texts if cited else ()):
            self._quote(text, {**place, "start_block_index": at, "end_block_index": at + 1})

    def add_search_result(self, texts: Sequence[str], source: str, title: str, cited: bool) -> None:
        place = {"type": "search_result_location", "search_result_index": self.search_results}
        self.search_results += 1
        for at, text in enumerate(texts if cited else ()):
            where = {**place, "source": source, "title": title}
            self._quote(text, {**where, "start_block_index": at, "end_block_index": at + 1})

    def _quote(self, text: str, where: dict[str, Any]) -> None:
        if len(self.quotable) < MAX_UNITS:
            self.quotable.append(Quotable(text, where))

    def placer(self) -> Placer[Quotable]:
        """What finds the sentences of an answer that these support: each by the best."""
        placer = Placer[Quotable](most=1)
        for each in self.quotable:
            placer.cite(each, each.text)
        return placer


def _sentences(text: str) -> Iterator[tuple[int, int]]:
    """Of the whole text; `sentences` reads a part at a time."""
    at = 0
    while at < len(text):
        found = list(sentences(text[at : at + MAX_TEXT_CHARS]))
        whole = at + MAX_TEXT_CHARS >= len(text)
        kept = found if whole or len(found) < 2 else found[:-1]
        yield from ((at + start, at + end) for start, end in kept)
        if whole:
            return
        at += found[-1][0] if len(found) > 1 else MAX_TEXT_CHARS
