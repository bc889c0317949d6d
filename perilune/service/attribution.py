"""Which sentence of an answer a source supports: where a citation belongs in the text.

Knows words, not the model: a sentence is supported by a quote that holds most of its words, weighed alike. What no
sentence fits belongs to the end of the text. Linear in the text's length.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from perilune.memory.analyse import Analyser
from perilune.memory.sentences import sentences

SUPPORTED = 0.5
"""Share of a sentence's distinct terms that its source holds."""

LEAST_TERMS = 2
"""And how many: one word in common says little."""

T = TypeVar("T")


class Placer(Generic[T]):
    """Takes citations and text as they come, and says where each citation belongs, as soon as that is known."""

    def __init__(self, most: int | None = None) -> None:
        """`most` is how many citations a sentence gets, the best ones; None: all that support it."""
        self._most = most
        self._analyser = Analyser()
        self._waiting: list[tuple[T, frozenset[str]]] = []
        self._text = ""
        self._read = 0  # characters whose sentences were looked at

    def cite(self, citation: T, quote: str) -> None:
        """Its sentence may have been said before."""
        self._waiting.append((citation, frozenset(self._analyser.terms(quote))))
        self._read = 0

    def say(self, text: str) -> list[tuple[T, int]]:
        """More of the answer; (citation, index) of those whose sentence has ended."""
        self._text += text
        placed: list[tuple[T, int]] = []
        while self._waiting:
            found = list(sentences(self._text[self._read :]))
            if len(found) < 2:  # the last one may go on
                break
            for start, end in found[:-1]:
                placed += self._place(self._read + start, self._read + end)
            self._read += found[-1][0]
        return placed

    def end(self) -> list[tuple[T, int]]:
        """The answer is complete: where all the others belong."""
        placed = self.finish()
        placed += [(citation, len(self._text)) for citation, _ in self._waiting]
        self._waiting = []
        return placed

    def finish(self) -> list[tuple[T, int]]:
        """The answer is complete: those of its last sentences. What supports none isn't given."""
        placed = self.say("")
        if self._waiting:
            for start, end in sentences(self._text[self._read :]):
                placed += self._place(self._read + start, self._read + end)
            self._read = len(self._text)
        return placed

    def _place(self, start: int, end: int) -> list[tuple[T, int]]:
        said = frozenset(self._analyser.terms(self._text[start:end]))
        least = max(LEAST_TERMS, SUPPORTED * len(said))
        shared = [(len(said & held), at) for at, (_, held) in enumerate(self._waiting)]
        fits = sorted((each for each in shared if each[0] >= least), key=lambda each: -each[0])[: self._most]
        chosen = sorted(at for _, at in fits)
        placed = [(self._waiting[at][0], end) for at in chosen]
        for at in reversed(chosen):
            del self._waiting[at]
        return placed
