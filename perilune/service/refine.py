"""Builds a refined prompt: newest turns and best passages within a budget of tokens.

Knows the library's search and the composer; doesn't know deadlines or plans. What is left out is disclosed, and so
is that nothing was found.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from perilune.core import Citation, Degradation, FileRecord, Passage, SearchResult
from perilune.service.compose import PASSAGE_INSTRUCTIONS, Composer, Conversation, Prompt
from perilune.service.passages import choose_passages, citation
from perilune.service.ports import Library

CANDIDATES = 48
"""Passages asked of the search; about twice what the largest usual budget holds."""

HISTORY_SHARE = 1 / 3
"""Part of the free budget that older turns may take where documents are referenced too."""

OPENING_PAGES = 8

STEP_BYTES_PER_TOKEN, KEPT_SHARE = 2, 1 / 2
"""The largest step, in bytes over the budget in tokens, and what it must leave: see `_steady_start`."""

_TURN_TOKENS = 8  # the template's own tokens around a turn, at most


@dataclass(frozen=True, slots=True)
class Refined:
    """A refined prompt; `exact` counts the tokens in it that were offered by the caller (labels are ours)."""

    prompt: Prompt
    exact: int
    citations: tuple[Citation, ...] = ()
    degradations: tuple[Degradation, ...] = ()
    found: SearchResult | None = None  # what the search for passages gave; None where there was none


class Refiner:
    """Refines one request's context. Runs in a thread."""

    def __init__(self, composer: Composer, library: Library, tenant: str) -> None:
        self._composer = composer
        self._library = library
        self._tenant = tenant

    def refine(self, records: Sequence[FileRecord], conversation: Conversation, budget: int) -> Refined:
        """A prompt of at most `budget` tokens (more only where instructions and question alone are more)."""
        kept, dropped = self._newest(conversation, budget, bool(records))
        said: list[Degradation] = []
        if dropped:
            said.append(
                Degradation("history_dropped", f"The oldest {dropped} messages of the conversation were left out.")
            )
        if not records:
            prompt = self._composer.compose([], kept, "")
            return Refined(prompt, len(prompt), (), tuple(said))
        passages, found = self._passages(records, conversation, budget - self._base(kept))
        if not found.hits:
            said.append(
                Degradation(
                    "nothing_found",
                    "No passage matches the question's words; the answer is from the opening of the document.",
                )
            )
        if faults := self._library.search_faults():
            said.append(Degradation("search_reduced", " ".join(faults)))
        names = {record.file_id: record.filename for record in records}
        pieces = [self._piece(passage, names) for passage in passages]
        prompt = self._composer.compose(pieces, kept, PASSAGE_INSTRUCTIONS)
        labels = sum(map(len, pieces)) - sum(self._composer.count(p.text) for p in passages)
        citations = tuple(citation(p, names) for p in passages)
        return Refined(prompt, len(prompt) - labels, citations, tuple(said), found)

    def _base(self, kept: Conversation) -> int:
        """Tokens that are spent before the first passage."""
        bare = len(self._composer.compose([], kept, ""))
        return bare + self._composer.count(PASSAGE_INSTRUCTIONS) + _TURN_TOKENS

    def _newest(self, conversation: Conversation, budget: int, documents: bool) -> tuple[Conversation, int]:
        """Drop turns from the oldest, always leaving the last question; what is kept starts with a user turn."""
        turns = conversation.turns
        starts = [i for i, turn in enumerate(turns) if turn.role == "user"]
        last = conversation.without_oldest(starts[-1])
        free = budget - self._base(last)
        allowed = int(free * HISTORY_SHARE) if documents else free + self._composer.count(PASSAGE_INSTRUCTIONS)
        first = starts[-1]
        for start in reversed(starts[:-1]):
            cost = sum(len(turn.token_ids) + _TURN_TOKENS for turn in turns[start : starts[-1]])
            if cost > allowed:
                break
            first = start
        if first == starts[0] and not conversation.omitted_turns:
            first = 0
        else:
            first = _steady_start(conversation, starts, first, budget)
        return conversation.without_oldest(first), first + conversation.omitted_turns

    def _passages(
        self, records: Sequence[FileRecord], conversation: Conversation, budget: int
    ) -> tuple[list[Passage], SearchResult]:
        """(chosen passages, what the search gave). The set that a question about order or counts needs comes
        first."""
        names = {record.file_id: record.filename for record in records}

        def count(passage: Passage) -> int:
            return len(self._piece(passage, names))

        found = self._library.find(self._tenant, list(names), conversation.query, CANDIDATES)
        if found.hits:
            ranked = [each for each in (*found.evidence, *found.hits) if isinstance(each, Passage)]
            distinct = list({(each.file_id, each.start): each for each in ranked}.values())
            return choose_passages(distinct, budget, count, list(names)), found
        opening = [
            Passage(record.file_id, page.number, page.start, page.end, page.text, 0.0, page.anchor)
            for record in records
            for page in self._library.pages(self._tenant, record.file_id)[:OPENING_PAGES]
            if page.text.strip()
        ]
        return choose_passages(opening, budget, count, list(names)), found

    def _piece(self, passage: Passage, names: dict[str, str]) -> array[int]:
        return self._composer.passage_piece(names[passage.file_id], passage)


def _steady_start(conversation: Conversation, starts: Sequence[int], first: int, budget: int) -> int:
    """A turn to begin with that stays the same for many turns, behind `first`, if there is one.

    Where each turn pushed out the oldest, no prompt would begin as the one before, and its KV would be of no use.
    So a beginning is the first turn behind a multiple of a step, counted in bytes from the conversation's first
    one. Steps are powers of two, so that a smaller one has the multiples of a larger; taken is the largest that
    leaves at least half of what fits.
    """
    turns = conversation.turns
    begins = [conversation.omitted_bytes]
    for turn in turns:
        begins.append(begins[-1] + len(turn.text.encode()))
    fits = sum(len(turn.token_ids) for turn in turns[first:])
    for power in range((STEP_BYTES_PER_TOKEN * budget).bit_length() - 1, 0, -1):
        for before, start in pairwise(starts):
            if start >= first and begins[start] >> power > begins[before] >> power:
                if sum(len(turn.token_ids) for turn in turns[start:]) >= KEPT_SHARE * fits:
                    return start
                break
    return first
