"""An answer's claims, each against the sources of its request (spec M9), where the request asks for it.

Knows events, passages and cited turns; how a claim is judged is memory/claims.py. A claim is searched for by its
own words, so that it gets the passage that says it, whatever the question's were. Verification begins when the
answer has ended and is bounded in time: it delays no text, and what it didn't come to is called unchecked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from perilune.core import Citation, CitationAdded, Claim, Completed, Event, Request, TextDelta, TurnCitation
from perilune.errors import NotFound
from perilune.memory.claims import ClaimJudge
from perilune.service.passages import citation
from perilune.service.ports import Library

MOST_CLAIMS = 64
PASSAGES = 3
"""Passages that a claim is compared with, the best for its words."""

BUDGET_S = 2.0
UNCHECKED = "unchecked"


async def verified(
    events: AsyncGenerator[Event, None], request: Request, library: Library
) -> AsyncGenerator[Event, None]:
    """The events; the last one's report has the claims of the first choice, as far as there are sources."""
    said: list[str] = []
    turns: list[TurnCitation] = []
    async with aclosing(events):
        async for event in events:
            match event:
                case TextDelta(choice=0, text=text):
                    said.append(text)
                case CitationAdded(citation=TurnCitation() as turn):
                    turns.append(turn)
                case Completed():
                    verifier = Verifier(library, request, turns)
                    found = await asyncio.to_thread(verifier.claims, "".join(said))
                    event = replace(event, report=replace(event.report, claims=found))
                case _:
                    pass
            yield event


class Verifier:
    """Judges one answer. Runs in a thread."""

    def __init__(self, library: Library, request: Request, turns: Sequence[TurnCitation]) -> None:
        self._library = library
        self._request = request
        self._turns = turns
        self._judge = ClaimJudge()
        self._ends_s = time.monotonic() + BUDGET_S

    def claims(self, answer: str) -> tuple[Claim, ...]:
        """Every claim in the answer's order; none where the request has nothing to compare them with."""
        files = self._request.file_ids
        if not files and not self._turns:
            return ()
        try:
            records = [self._library.get_file(self._request.tenant, file_id) for file_id in files]
        except NotFound:  # deleted since the answer began
            return ()
        names = {record.file_id: record.filename for record in records}
        spans = [span for span, _ in zip(self._judge.claims(answer), range(MOST_CLAIMS), strict=False)]
        return tuple(self._judged(answer, start, end, names) for start, end in spans)

    def _judged(self, answer: str, start: int, end: int, names: Mapping[str, str]) -> Claim:
        if time.monotonic() > self._ends_s:
            return Claim(start, end, UNCHECKED)
        said = answer[start:end]
        found = self._library.search(self._request.tenant, list(names), said, PASSAGES) if names else []
        judgement = self._judge.judge(said, [each.text for each in found] + [turn.quote for turn in self._turns])
        sources: list[Citation | TurnCitation] = [*(citation(each, names) for each in found), *self._turns]
        return Claim(
            start, end, judgement.verdict.value, None if judgement.source is None else sources[judgement.source]
        )
