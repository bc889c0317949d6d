"""Counts documents and computes the KV that every question about them starts with, at idle priority.

Knows the library's texts, the composer and the engine's streams; doesn't know ingest states or requests. A context
that leaves no room for a question in the window is only counted, because no prompt could reuse its KV.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from perilune.core import (
    EngineFinished,
    FileRecord,
    FinishReason,
    KVPolicy,
    SamplingParams,
    SequenceSpec,
    ServiceClass,
)
from perilune.errors import InternalError, Overloaded, PeriluneError
from perilune.service.backends.local import LocalBackend
from perilune.service.compose import MAX_CHARS_PER_TOKEN, Composer, slices
from perilune.service.ports import Library
from perilune.service.presets import all_full
from perilune.telemetry import Telemetry

_log = logging.getLogger(__name__)

QUESTION_RESERVE_TOKENS = 512
"""Window kept free for instructions, question and answer when a document is judged to fit."""

_RETRY_S = 0.5
_YIELD_S = 0.001


@dataclass(frozen=True, slots=True)
class Context:
    """Documents as a prompt begins with them: tokens of each; the prefix, None where no prompt holds it."""

    tokens: tuple[int, ...]
    prefix: Sequence[int] | None


class Warmer:
    """`count` runs in a thread, `compute` on the event loop."""

    def __init__(
        self,
        library: Library,
        composer: Composer,
        backend: LocalBackend,
        salt_of: Callable[[str], bytes],
        window_tokens: int,
        telemetry: Telemetry,
        kv_of: Callable[[str], KVPolicy] = all_full,
    ) -> None:
        self._library = library
        self._composer = composer
        self._backend = backend
        self._kv_of = kv_of
        self._salt_of = salt_of
        self._telemetry = telemetry
        self.limit_tokens = window_tokens - QUESTION_RESERVE_TOKENS
        """Most tokens of a context that is worth computing."""

    def count(self, records: Sequence[FileRecord], stopped: Callable[[], bool]) -> Context:
        """Count documents and compose their prefix. Once `stopped` is true the result is soon, and nonsense."""
        texts = [self._library.text(record.tenant, record.file_id) for record in records]
        tokens = tuple(
            self._tokens(record.file_id, text, stopped) for record, text in zip(records, texts, strict=True)
        )
        if sum(tokens) > self.limit_tokens or stopped():
            for record in records:
                self._composer.drop_document(record.file_id)
            return Context(tokens, None)
        try:
            pieces = [
                self._composer.document_piece(record.filename, self._composer.encode_document(record.file_id, text))
                for record, text in zip(records, texts, strict=True)
            ]
            prefix = self._composer.context_prefix(pieces)
        except PeriluneError as error:  # a base model, or markers in the text: indexed and searchable all the same
            _log.info("%s is not prefilled: %s", records[0].file_id, error)
            return Context(tokens, None)
        return Context(tokens, prefix if 0 < len(prefix) <= self.limit_tokens else None)

    async def compute(self, owner: str, tenant: str, prefix: Sequence[int]) -> None:
        """Compute and keep the KV of a prefix for `owner`. A failure is logged: KV is a cache, and without it a
        document is still answered from, only colder. Cancelling stops the work."""
        spec = SequenceSpec(
            seq_id=f"ingest-{owner}",
            token_ids=prefix,
            salt=self._salt_of(tenant),
            sampling=SamplingParams(),
            max_new_tokens=0,
            service_class=ServiceClass.P2_BATCH,
            shared_tokens=len(prefix),
            persist_owner=owner,
            prefill_only=True,
            kv_policy=self._kv_of(tenant),
            tenant=tenant,
        )
        finished = await self._run(spec)
        if finished.reason is FinishReason.ERROR:
            self._telemetry.count("ingest_prefill_failed")
            _log.warning("prefill of %s failed: %s", owner, finished.error)

    async def _run(self, spec: SequenceSpec) -> EngineFinished:
        """Waits for room in the engine's queue, unless the engine is dead and will never have any."""
        while True:
            try:
                return await self._backend.finish(spec)
            except Overloaded as error:
                if not self._backend.alive:
                    return EngineFinished(spec.seq_id, FinishReason.ERROR, error.message)
            except InternalError as error:
                return EngineFinished(spec.seq_id, FinishReason.ERROR, error.message)
            await asyncio.sleep(_RETRY_S)

    def _tokens(self, file_id: str, text: str, stopped: Callable[[], bool]) -> int:
        if len(text) > self.limit_tokens * MAX_CHARS_PER_TOKEN:
            return sum(self._counted_gently(text, stopped))
        return len(self._composer.encode_document(file_id, text))

    def _counted_gently(self, text: str, stopped: Callable[[], bool]) -> Iterator[int]:
        """Tokens of each slice, leaving the interpreter to others in between."""
        for piece in slices(text):
            if stopped():
                return
            yield self._composer.count(piece)
            time.sleep(_YIELD_S)
