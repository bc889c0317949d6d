"""Documents: files, pages, passages, citations, and searches of a set of files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class FileStatus(StrEnum):
    UPLOADED = "uploaded"
    PARSING = "parsing"
    PREFILLING = "prefilling"  # parsed and searchable; KV is being computed
    PROCESSED = "processed"
    ERROR = "error"


DOCUMENT_PURPOSES = frozenset({"user_data", "assistants", "file-extract", "vision", "image", "web_search"})
"""Purposes of files that are read, indexed and prefilled. Other files, like those of batches, are only kept."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """An uploaded file. `tokens` is known once it is parsed; `pages_total` once the parser has opened it."""

    file_id: str
    tenant: str
    filename: str
    purpose: str
    size_bytes: int
    sha256: str
    created_at: float  # seconds since the epoch
    status: FileStatus
    pages_total: int | None = None
    pages_parsed: int = 0
    tokens: int | None = None
    language: str | None = None  # "en", "zh", …; None while unknown
    error: str | None = None
    local_only: bool = False  # its text never leaves this machine
    expires_at: float | None = None  # it is gone from then on; None: it stays
    error_code: str | None = None  # which `errors.Unreadable` it is; None where that isn't known

    @property
    def is_document(self) -> bool:
        """It is read: it has text, an index and KV."""
        return self.purpose in DOCUMENT_PURPOSES


@dataclass(frozen=True, slots=True)
class Page:
    """One page of extracted text. `start` and `end` are character offsets in the document's whole text."""

    number: int  # counts from 1
    text: str
    start: int
    end: int
    anchor: str = ""  # where it is, for people, where the number says little: "slide 4", "src/a.py, lines 3-40"


@dataclass(frozen=True, slots=True)
class PageView:
    """A page as it is shown: of which file, of how many pages that are read so far, and whether it can be drawn."""

    page: Page
    filename: str
    pages: int
    drawable: bool


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved piece: characters `start`:`end` of the document's whole text, all on `page`."""

    file_id: str
    page: int
    start: int
    end: int
    text: str
    score: float
    anchor: str = ""  # see `Page.anchor`; narrowed to the passage's own lines where it names lines


@dataclass(frozen=True, slots=True)
class Citation:
    """Where an answer's context came from (spec M9)."""

    file_id: str
    filename: str
    page: int
    start: int
    end: int
    quote: str
    anchor: str = ""  # see `Passage.anchor`


AttributeValue = str | float | bool
"""What may be noted of a file in a vector store."""


@dataclass(frozen=True, slots=True)
class AttributeComparison:
    """One attribute against a value, as OpenAI's filters have it; `in` and `nin` take a tuple."""

    key: str
    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    value: AttributeValue | tuple[AttributeValue, ...]


@dataclass(frozen=True, slots=True)
class AttributeCombination:
    """Filters of which all must hold, or one."""

    type: Literal["and", "or"]
    filters: tuple[AttributeFilter, ...]


AttributeFilter = AttributeComparison | AttributeCombination


@dataclass(frozen=True, slots=True)
class FileSearch:
    """Vector stores that a request searches for its question: files by attribute, at most so many passages, of at
    least this score."""

    store_ids: tuple[str, ...]
    wanted: AttributeFilter | None = None
    max_results: int = 20
    min_score: float = 0.0


@dataclass(frozen=True, slots=True)
class StoreHit:
    """A passage that a search of vector stores found. `score` is from 0 to 1; the place is that of a `Passage`."""

    file_id: str
    filename: str
    attributes: Mapping[str, AttributeValue]
    score: float
    page: int
    start: int
    end: int
    text: str
