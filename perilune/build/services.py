"""The service: everything that answers, wired from what is open and the engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.build.backends import backends, departure_of
from perilune.build.opened import Opened
from perilune.build.rooms import Rooms, machine_of, parts_of
from perilune.core import KeyLimits
from perilune.errors import ConfigError
from perilune.service.ports import Caller

if TYPE_CHECKING:
    from perilune.memory.batches import Batch
    from perilune.memory.keys import KeyOwner, Keyring
    from perilune.service.archive import Archive
    from perilune.service.batch.service import BatchService
    from perilune.service.caches.answers import AnswerCaches
    from perilune.service.documents import DocumentService
    from perilune.service.ledger import Ledger
    from perilune.service.parts import Parts
    from perilune.service.pool import Backends
    from perilune.service.ratings import RatingService
    from perilune.service.retention import Retention
    from perilune.service.service import Service
    from perilune.service.uploads import UploadService


def service_of(rooms: Rooms) -> Service:
    """Everything wired. Raises `ConfigError` for settings that contradict each other."""
    from perilune.memory.uploads import UploadStore
    from perilune.memory.vector_stores import VectorStores
    from perilune.service.admission import Admission
    from perilune.service.kv_health import KVHealth
    from perilune.service.service import Service
    from perilune.service.uploads import UploadService
    from perilune.service.vector_stores import VectorStoreService

    opened, settings, telemetry = rooms.opened, rooms.opened.settings, rooms.opened.telemetry

    def forget_answers(tenant: str) -> None:
        caches.forget(tenant)
        batches.wake()

    departure = departure_of(settings, telemetry)
    parts = parts_of(rooms, departure, forget_answers)
    caches, batches = _caches(opened, parts.documents), _batches(rooms, parts.documents)
    routed = backends(settings, parts, departure)
    archive, feedback = _archive(opened), _feedback(opened, parts)
    uploads = UploadService(UploadStore(opened.store, settings.home), parts.documents, settings.server.max_upload)
    authenticate, known = _authenticator(rooms.keys)
    return Service(
        parts,
        Admission(settings.server.max_queue + settings.runtime.max_batch_size, telemetry),
        authenticate,
        KVHealth(rooms.engine, settings),
        routed,
        _ledger(opened, routed, parts),
        archive,
        feedback,
        VectorStoreService(VectorStores(opened.store), rooms.library),
        caches,
        uploads,
        batches,
        known,
        _retention(opened, parts, archive, feedback, uploads),
        machine_of(rooms).view,
        opened.memory,
    )


def _archive(opened: Opened) -> Archive:
    """Kept answers. One process owns a home: what it left unfinished is told by the home's name."""
    from perilune.memory.responses import ResponseStore
    from perilune.service.archive import Archive

    if opened.memory is None:
        return Archive(None)
    settings = opened.settings
    runner = hashlib.sha256(str(settings.home.resolve()).encode()).hexdigest()[:32]
    return Archive(ResponseStore(opened.store, runner=runner, quota_bytes=settings.memory.responses_quota))


def _feedback(opened: Opened, parts: Parts) -> RatingService:
    from perilune.memory.ratings import Ratings
    from perilune.service.ratings import RatingService

    kept = Ratings(opened.store, opened.memory.marks) if opened.memory is not None else None
    return RatingService(kept, parts.sessions, opened.telemetry)


def _ledger(opened: Opened, routed: Backends, parts: Parts) -> Ledger:
    from perilune.memory.usage import UsageStore
    from perilune.service.ledger import Ledger

    given = opened.settings.limits.model_dump()
    limits = KeyLimits(**{name: value or None for name, value in given.items()})
    return Ledger(UsageStore(opened.store), limits, routed.routes.price, parts.clock, time.time, opened.telemetry)


def _retention(
    opened: Opened, parts: Parts, archive: Archive, feedback: RatingService, uploads: UploadService
) -> Retention | None:
    """What deletes by age; none in a process that doesn't live on."""
    from perilune.service.retention import Retention

    if opened.memory is None:
        return None
    settings = opened.settings
    return Retention(
        parts.documents,
        parts.sessions,
        archive,
        feedback,
        uploads,
        settings.documents.keep_days,
        settings.memory.keep_days,
    )


def _batches(rooms: Rooms, documents: DocumentService) -> BatchService:
    from perilune.memory.batches import BatchStore
    from perilune.service.batch.lines import InputLimits
    from perilune.service.batch.queue import BatchQueue
    from perilune.service.batch.runner import BatchRunner
    from perilune.service.batch.service import BatchService

    opened, settings = rooms.opened, rooms.opened.settings
    given, rows = settings.batch, BatchStore(opened.store)

    def caller_of(batch: Batch) -> Caller | None:
        if batch.key_id is None:
            return Caller(batch.tenant, "user")
        owner = rooms.keys.owner(batch.key_id)
        return None if owner is None else _caller(owner)

    limits = InputLimits(given.max_lines, settings.server.max_body, given.max_input)
    concurrency = given.concurrency or settings.runtime.max_batch_size
    runner = BatchRunner(rows, rooms.library, caller_of, limits, concurrency, opened.telemetry)
    queue = BatchQueue(runner, settings.home, settings.database)
    return BatchService(rows, runner, queue, documents, given.max_open)


def _caches(opened: Opened, documents: DocumentService) -> AnswerCaches:
    """Raises `ConfigError` for likeness without an embedder, and for a bad file of curated answers."""
    from perilune.service.caches.answers import AnswerCaches, CachePolicy
    from perilune.service.caches.faq import CuratedAnswers

    settings, memory = opened.settings, opened.memory
    given, vectors = settings.answer_cache, memory.vector if memory is not None else None
    if given.semantic and settings.memory.embedder == "off":
        raise ConfigError(
            "answer_cache.semantic compares questions by an embedder, and memory.embedder is off.",
            hint="Set memory.embedder, or answer_cache.exact instead.",
            param="answer_cache.semantic",
        )
    policy = CachePolicy(given.exact, given.semantic, given.ttl_s, given.tenant_quota, given.likeness)
    curated = CuratedAnswers(Path(given.faq).expanduser()) if given.faq else None
    return AnswerCaches(policy, documents, curated, vectors, time.monotonic, opened.telemetry)


def _authenticator(
    keys: Keyring,
) -> tuple[Callable[[str | None], Caller], Callable[[str | None], Caller | None]]:
    """What looks a key up, and what only knows those that were."""

    def known(key: str | None) -> Caller | None:
        owner = keys.known(key)
        return _caller(owner) if owner is not None else None

    return lambda key: _caller(keys.authenticate(key)), known


def _caller(owner: KeyOwner) -> Caller:
    return Caller(owner.tenant, owner.role, owner.deadline_s, owner.key_id, owner.limits)
