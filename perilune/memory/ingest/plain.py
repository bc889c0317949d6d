"""Plain text, Markdown, CSV, JSON and code -> pages with line numbers. The joined pages are the decoded file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from perilune.memory.ingest.encoding import read_text
from perilune.memory.ingest.pagination import PageText, Parsed, paginate
from perilune.memory.ingest.source import Source

_LANGUAGES = {
    "C": ".c .h",
    "C#": ".cs",
    "C++": ".cc .cpp .cxx .hh .hpp .hxx",
    "CSS": ".css .scss .less",
    "CUDA": ".cu .cuh",
    "Clojure": ".clj .cljs",
    "Dart": ".dart",
    "Elixir": ".ex .exs",
    "Erlang": ".erl .hrl",
    "Fortran": ".f .f90 .f95",
    "Go": ".go",
    "Haskell": ".hs",
    "Java": ".java",
    "JavaScript": ".js .jsx .mjs .cjs",
    "Julia": ".jl",
    "Kotlin": ".kt .kts",
    "Lua": ".lua",
    "MATLAB": ".m",
    "OCaml": ".ml .mli",
    "PHP": ".php",
    "Perl": ".pl .pm",
    "Protocol Buffers": ".proto",
    "Python": ".py .pyi",
    "R": ".r",
    "Ruby": ".rb",
    "Rust": ".rs",
    "SQL": ".sql",
    "Scala": ".scala",
    "Shell": ".sh .bash .zsh",
    "Swift": ".swift",
    "TypeScript": ".ts .tsx",
    "Zig": ".zig",
}
_LANGUAGE_OF = {suffix: language for language, suffixes in _LANGUAGES.items() for suffix in suffixes.split()}


def parse(source: Source) -> Parsed:
    """Raises `UnsupportedDocument` for binary data."""
    language = _LANGUAGE_OF.get(source.suffix)
    pages = _with_lines(paginate(read_text(source)), f"{language}, " if language else "")
    return Parsed(None, islice(pages, source.first_page - 1, None))


def _with_lines(texts: Iterable[str], prefix: str) -> Iterator[PageText]:
    """Pages that say which lines of the file they hold, counted from 1."""
    first = 1
    for text in texts:
        ends = text.count("\n")
        last = max(first, first + ends - text.endswith("\n"))
        lines = f"line {first}" if first == last else f"lines {first}-{last}"
        yield PageText(text, prefix + lines)
        first += ends
