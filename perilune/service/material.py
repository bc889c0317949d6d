"""Gathers what a request offers: waits for documents that are still being read, counts, composes the whole prompt.

Knows ingest states and token counts; makes no choice between plans.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from perilune.core import ContextPolicy, Degradation, FileRecord, FileStatus
from perilune.errors import UnsupportedDocument
from perilune.service.compose import (
    DOCUMENT_INSTRUCTIONS,
    MAX_CHARS_PER_TOKEN,
    PASSAGE_INSTRUCTIONS,
    Composer,
    Conversation,
    Prompt,
)
from perilune.service.documents import DocumentService
from perilune.service.ports import Library

WAIT_SHARE = 0.3
"""Share of the deadline spent waiting for an unfinished ingest, once there is something to answer from."""

CHARS_PER_TOKEN = 4
"""Only used to estimate the size of text that isn't counted yet."""

_POLL_S = 0.02
READ = frozenset({FileStatus.PREFILLING, FileStatus.PROCESSED})
"""Documents whose text is complete."""


@dataclass(frozen=True, slots=True)
class Material:
    """What was offered. `prompt` holds all of it, where the window allows; `offered` and `required` are tokens:
    of that prompt (an estimate while `complete` is false) and of the smallest one that still asks the question."""

    records: tuple[FileRecord, ...]
    prompt: Prompt | None
    offered: int
    required: int
    complete: bool
    degradations: tuple[Degradation, ...] = ()


class MaterialReader:
    """Reads one request's documents and conversation."""

    def __init__(
        self,
        documents: DocumentService,
        composer: Composer,
        library: Library,
        clock: Callable[[], float],
    ) -> None:
        self._documents = documents
        self._composer = composer
        self._library = library
        self._clock = clock

    def patience(self, policy: ContextPolicy, deadline_s: float) -> float | None:
        """Seconds after arrival that an ingest may take; None: until it ends (pinned `full`)."""
        return None if policy is ContextPolicy.FULL else WAIT_SHARE * deadline_s

    async def least_tokens(self, records: Sequence[FileRecord]) -> int:
        """Tokens that the documents have at least, by what is read of them so far."""
        least = 0
        for record in records:
            if record.tokens is not None:
                least += record.tokens
            else:
                chars = await asyncio.to_thread(self._library.text_chars, record.tenant, record.file_id)
                least += chars // MAX_CHARS_PER_TOKEN
        return least

    async def readable(
        self,
        records: Sequence[FileRecord],
        arrival_s: float,
        patience_s: float | None,
        timeout_s: float,
        progressed: Callable[[Sequence[FileRecord]], Awaitable[None]],
    ) -> list[FileRecord]:
        """Wait until every document is read, or patience is over and each has at least one page.

        `progressed` is awaited whenever more is read, and may raise. Raises `UnsupportedDocument` for a document
        that can't be read.
        """
        current = list(records)
        while True:
            for record in current:
                if not record.is_document:
                    raise UnsupportedDocument(
                        f"{record.filename} was uploaded for {record.purpose} and isn't read as a document.",
                        hint="Upload it with the purpose user_data.",
                        param="file_id",
                    )
                if record.status is FileStatus.ERROR:
                    raise UnsupportedDocument(
                        f"{record.filename} can't be used: {record.error or 'it could not be read.'}",
                        hint="Delete it and upload a readable version.",
                        param="file_id",
                    )
            unread = [record for record in current if record.status not in READ]
            waited_s = self._clock() - arrival_s
            enough = patience_s is not None and waited_s >= patience_s and all(r.pages_parsed for r in unread)
            if not unread or enough or waited_s >= timeout_s:
                return current
            await asyncio.sleep(_POLL_S)
            before = current
            current = [
                record if record.status in READ else await self._documents.get(record.tenant, record.file_id)
                for record in before
            ]
            if any(new.pages_parsed > old.pages_parsed for new, old in zip(current, before, strict=True)):
                await progressed(current)

    def read(self, records: Sequence[FileRecord], bare: Prompt, conversation: Conversation, room: int) -> Material:
        """Count everything; compose it where it fits `room` tokens. Runs in a thread."""
        said = len(bare) + conversation.omitted_tokens
        if conversation.omitted_turns:
            said = max(said, room + 1)
        if not records:
            prompt = None if conversation.omitted_turns else bare
            return Material((), prompt, said, self.least_prompt(conversation, bare), True)
        complete = all(record.status in READ for record in records)
        required = self.least_prompt(conversation, bare) + self._composer.count(PASSAGE_INSTRUCTIONS)
        counts = [self._tokens(record) for record in records]
        offered = said + sum(counts)
        prompt = None
        if complete and offered <= room:
            pieces = [self._piece(record) for record in records]
            prompt = self._composer.compose(pieces, conversation, DOCUMENT_INSTRUCTIONS)
            offered = len(prompt)
        return Material(tuple(records), prompt, offered, required, complete, tuple(coverage(records)))

    def least_prompt(self, conversation: Conversation, bare: Prompt) -> int:
        """Tokens of the instructions and the last question alone."""
        last = max(i for i, turn in enumerate(conversation.turns) if turn.role == "user")
        if last == 0:
            return len(bare)
        return len(self._composer.compose([], conversation.without_oldest(last), ""))

    def _tokens(self, record: FileRecord) -> int:
        """A document's tokens: counted if that is done, else estimated from what is read so far."""
        if record.tokens is not None:
            return record.tokens
        text = self._library.text(record.tenant, record.file_id)
        if record.status in READ and len(text) < 200_000:
            return len(self._composer.encode_document(record.file_id, text))
        share = record.pages_parsed / record.pages_total if record.pages_total else 1.0
        return int(len(text) / CHARS_PER_TOKEN / max(share, 0.01))

    def _piece(self, record: FileRecord) -> array[int]:
        text = self._library.text(record.tenant, record.file_id)
        ids = self._composer.encode_document(record.file_id, text)
        return self._composer.document_piece(record.filename, ids)


def coverage(records: Sequence[FileRecord]) -> list[Degradation]:
    """What is said about documents that are still being read."""
    result = []
    for record in records:
        if record.status not in READ:
            total = f" of {record.pages_total:,}" if record.pages_total else ""
            result.append(
                Degradation(
                    "partial_ingest",
                    f"{record.filename} is still being read: pages parsed {record.pages_parsed:,}{total}.",
                )
            )
    return result
