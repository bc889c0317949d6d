"""Deletes what was kept for as long as the settings say, sessions by their last turn, documents by their upload;
and files that were uploaded with a time of their own.

Knows ages and when to look; how things are deleted is their services'. The audit names `retention` as the actor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from perilune.errors import PeriluneError
from perilune.memory.audit import acting
from perilune.service.archive import Archive
from perilune.service.documents import DocumentService
from perilune.service.ratings import RatingService
from perilune.service.sessions import SessionService
from perilune.service.uploads import UploadService

ACTOR = "retention"
DAY_S = 86_400.0
INTERVAL_S = 3_600.0
"""Between two looks."""

_log = logging.getLogger(__name__)


class Retention:
    """One background task. `sessions_days` (of kept answers and feedback, too) and `documents_days` None: kept
    until somebody deletes them."""

    def __init__(
        self,
        documents: DocumentService,
        sessions: SessionService,
        archive: Archive,
        feedback: RatingService,
        uploads: UploadService,
        documents_days: float | None,
        sessions_days: float | None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._documents = documents
        self._sessions = sessions
        self._archive = archive
        self._uploads = uploads
        self._feedback = feedback
        self._documents_days = documents_days
        self._sessions_days = sessions_days
        self._now = now
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="retention")

    async def close(self) -> None:
        """Stop, between two deletions."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def sweep(self) -> int:
        """Delete what is older than it may be; returns how many documents, sessions, kept answers and ratings."""
        gone = 0
        with acting(ACTOR):
            gone += await self._documents.expire_due() + await self._uploads.expire()
            if self._documents_days is not None:
                gone += await self._documents.expire(self._now() - DAY_S * self._documents_days)
            if self._sessions_days is not None:
                before_s = self._now() - DAY_S * self._sessions_days
                gone += await self._sessions.expire(before_s) + await self._archive.expire(before_s)
                gone += await self._feedback.expire(before_s)
        return gone

    async def _run(self) -> None:
        while True:
            try:
                if gone := await self.sweep():
                    _log.info("retention deleted %d documents, sessions, kept answers and ratings", gone)
            except PeriluneError as error:
                _log.warning("retention goes on in an hour: %s", error.message)
            except Exception:
                _log.exception("retention goes on in an hour")
            await asyncio.sleep(INTERVAL_S)
