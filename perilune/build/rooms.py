"""What a request uses: the model with its prompts and plans, documents, sessions, the web."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perilune.build.opened import Opened
from perilune.config import Settings
from perilune.core import BLOCK_TOKENS, KVPolicy, ServiceClass
from perilune.service.model import ServedModel

if TYPE_CHECKING:
    from perilune.engine.loop import EngineLoop
    from perilune.memory.keys import Keyring
    from perilune.memory.library import Library
    from perilune.service.backends.local import LocalBackend
    from perilune.service.compose import Composer
    from perilune.service.documents import DocumentService
    from perilune.service.machine import Machine
    from perilune.service.parts import Limits, Parts
    from perilune.service.peak import Peak
    from perilune.service.predictor import Predictor
    from perilune.service.privacy.departure import Deidentified
    from perilune.service.sessions import SessionService
    from perilune.service.web_search import WebSearch


@dataclass(frozen=True, slots=True)
class Rooms:
    """What is open, and the parts between it and the service."""

    opened: Opened
    model: ServedModel
    keys: Keyring
    library: Library
    predictor: Predictor
    engine: EngineLoop

    def kv_of(self, tenant: str) -> KVPolicy:
        """How this tenant's KV is kept."""
        kv = self.opened.settings.kv_cache
        return KVPolicy(kv.tenants.get(tenant, kv.policy))

    def salt_of(self, tenant: str) -> bytes:
        """What this tenant's KV is hashed with, so that nobody else finds it."""
        from perilune.runtime.kv.spec import tenant_salt

        runtime = self.opened.loaded.runtime
        tiers = runtime.tiers if self.kv_of(tenant) is KVPolicy.TIERED else None
        return tenant_salt(self.keys.tenant_secret(tenant), runtime.kv_spec, tiers.spec if tiers else None)


def parts_of(rooms: Rooms, departure: Deidentified, forget_answers: Callable[[str], None]) -> Parts:
    """What every request uses. `forget_answers` hears whose kept answers are void."""
    from perilune.memory.language import detect
    from perilune.service.abstain import Abstain
    from perilune.service.backends.local import LocalBackend
    from perilune.service.compose import Composer
    from perilune.service.parts import Parts
    from perilune.service.thinking import style_of
    from perilune.service.tools.formats import format_of

    opened, settings, loaded = rooms.opened, rooms.opened.settings, rooms.opened.loaded
    template = loaded.chat_template
    source = template.source if template is not None else ""
    notation, backend = format_of(source), LocalBackend(rooms.engine)
    composer = Composer(loaded.tokenizer, template, rooms.model.window_tokens, notation.result_role)
    documents = _documents(rooms, composer, backend, forget_answers)
    sessions = _sessions(opened, documents)
    return Parts(
        model=rooms.model,
        tokenizer=loaded.tokenizer,
        composer=composer,
        grammars=loaded.grammars,
        tool_format=notation,
        library=rooms.library,
        documents=documents,
        sessions=sessions,
        backend=backend,
        predictor=rooms.predictor,
        salt_of=rooms.salt_of,
        detect_language=detect,
        limits=_limits(settings),
        web=_web(settings, documents, sessions, departure),
        peak=_peak(opened),
        clock=time.monotonic,
        telemetry=opened.telemetry,
        kv_of=rooms.kv_of,
        preset=settings.attention.preset,
        abstain=Abstain(settings.memory.abstain),
        thinking=style_of(template, source),
    )


def _documents(
    rooms: Rooms, composer: Composer, backend: LocalBackend, forget_answers: Callable[[str], None]
) -> DocumentService:
    from perilune.service.documents import DocumentService

    opened, runtime = rooms.opened, rooms.opened.loaded.runtime
    stores = opened.kv_stores

    def owners() -> list[str]:
        return list({entry.owner for store in stores for entry in store.entries()})

    disk_bytes = opened.settings.kv_cache.disk_quota if stores else 0
    kept_bytes = disk_bytes or runtime.num_blocks * runtime.kv_spec.block_bytes
    return DocumentService(
        rooms.library,
        composer,
        backend,
        rooms.salt_of,
        owners,
        rooms.model.window_tokens,
        kept_bytes // runtime.kv_spec.token_bytes,
        opened.settings.server.max_upload,
        opened.telemetry,
        rooms.kv_of,
        forget_answers,
    )


def _sessions(opened: Opened, documents: DocumentService) -> SessionService:
    from perilune.memory.sessions import Sessions
    from perilune.service.sessions import SessionService

    kept = Sessions(opened.store, opened.memory) if opened.memory is not None else None
    return SessionService(kept, documents.forget_kv, opened.telemetry)


def _web(
    settings: Settings, documents: DocumentService, sessions: SessionService, departure: Deidentified
) -> WebSearch:
    from perilune.service.backends.searxng import SearXNG
    from perilune.service.web_search import WebSearch

    given = settings.web_search
    engine = SearXNG(given.url, departure, given.timeout) if given.url else None
    return WebSearch(engine, documents, sessions)


def _peak(opened: Opened) -> Peak:
    from perilune.service.peak import Peak

    scheduler = opened.settings.scheduler
    classes = [ServiceClass(int(name.removeprefix("P"))) for name in scheduler.peak_classes]
    return Peak(scheduler.peak_queue, classes, opened.telemetry)


def _limits(settings: Settings) -> Limits:
    from perilune.service.parts import Limits

    deadlines = settings.deadlines
    return Limits(
        deadlines.interactive_s, deadlines.document_s, deadlines.reserve_s, settings.model_serving.timeout
    )


def machine_of(rooms: Rooms) -> Machine:
    """What `/v1/machine` tells."""
    from perilune.service.machine import LoadedFacts, Machine

    settings, loaded = rooms.opened.settings, rooms.opened.loaded
    blocks, spec = loaded.runtime.num_blocks, loaded.runtime.kv_spec
    facts = LoadedFacts(
        parameters=loaded.info.parameters,
        trained_tokens=max(loaded.info.trained_tokens, loaded.info.max_context_tokens),
        kv_bytes=blocks * spec.block_bytes,
        kv_tokens=blocks * BLOCK_TOKENS,
        kernels=loaded.info.kernels,
        threads=settings.runtime.threads or len(os.sched_getaffinity(0)),
    )
    return Machine(settings, rooms.model, facts, rooms.predictor)
