"""Wires the layers together: settings in, a running application out. The only place that knows every layer.

Heavy imports happen inside, so that importing this module costs nothing. Loading the model, opening the database
and opening the KV folder run side by side, because `ask` counts from process start.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.config import BackendSettings, KVCacheSettings, SchedulerSettings, Settings
from perilune.core import BLOCK_TOKENS, KeyLimits, KVPolicy
from perilune.errors import ConfigError
from perilune.runtime.evaluate.length_record import read as read_length
from perilune.service.model import ServedModel
from perilune.service.ports import Caller
from perilune.telemetry import Telemetry

if TYPE_CHECKING:
    from perilune.engine.loop import EngineLoop
    from perilune.engine.scheduling import SchedulingPolicy
    from perilune.engine.stepper import TierPolicy
    from perilune.memory.keys import KeyOwner, Keyring
    from perilune.memory.library import Library
    from perilune.memory.memory import Memory
    from perilune.memory.ratings import Ratings
    from perilune.memory.responses import ResponseStore
    from perilune.memory.sessions import Sessions
    from perilune.memory.store import Store
    from perilune.memory.usage import UsageStore
    from perilune.memory.vector_stores import VectorStores
    from perilune.ops.metrics import PrometheusSink
    from perilune.runtime.hub.pull import ModelFiles
    from perilune.runtime.kv.disk import DiskKVStore
    from perilune.runtime.kv.sizing import TierSettings
    from perilune.runtime.loader import LoadedModel, ModelInfo
    from perilune.service.answer import Limits, Parts
    from perilune.service.backends.openai import Address
    from perilune.service.batch.service import BatchService
    from perilune.service.caches.answers import AnswerCaches, Vectors
    from perilune.service.documents import DocumentService
    from perilune.service.machine import Machine
    from perilune.service.pool import Backends
    from perilune.service.predictor import Predictor
    from perilune.service.privacy.departure import Deidentified
    from perilune.service.service import Service
    from perilune.service.sessions import SessionService
    from perilune.service.web_search import WebSearch

KV_FOLDER = "kv"
"""Name of the KV folder in the home folder."""

SEGMENT_FOLDER = "kv-segments"
"""And of the one that holds closed segments of tiered KV."""

SEGMENT_QUOTA_SHARE = 1 / 3
"""Of the disk quota, for closed segments where there are any: INT8 beside the bf16 that they were made of."""


@dataclass(frozen=True, slots=True)
class Application:
    """Everything that runs, and how it starts and stops. `start` and `close` belong to the event loop."""

    settings: Settings
    telemetry: Telemetry
    metrics: PrometheusSink
    service: Service
    library: Library
    keys: Keyring
    engine: EngineLoop
    model: ServedModel
    kernels: str  # which ones compute, in words
    closers: contextlib.ExitStack
    memory: Memory | None = None

    async def start(self) -> None:
        """Start the engine, warm it up, resume unfinished ingests and indexing."""
        self.engine.start()
        if self.memory:
            self.memory.start()
        await self.service.start(self.settings.runtime.cache_warmup)

    async def close(self) -> None:
        """Stop ingests, the engine and the stores, in that order. Idempotent."""
        await self.service.close()
        await asyncio.to_thread(self.closers.close)


def build(settings: Settings, *, indexed: bool = False) -> Application:
    """Load the model and open the home folder; `Application.start` runs it. `indexed` runs the index of meaning
    beside it, for a process that lives on; without, documents are searched by words.

    Raises `ModelNotFound`, `UnsupportedModel`, `Overloaded` (it doesn't fit), `Conflict` (another process owns the
    KV folder) and `ConfigError`; whatever was opened before is closed again.
    """
    from perilune.ops.metrics import PrometheusSink
    from perilune.runtime.hub.pull import resolve

    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = resolve(settings.model.path, settings.home)
    metrics = PrometheusSink(files.card.name)
    telemetry = Telemetry(metrics)
    with contextlib.ExitStack() as closers:
        kv, segments, loaded, store = _open_side_by_side(settings, files, telemetry, closers)
        memory = _open_memory(settings, store, closers) if indexed else None
        application = _wire(settings, files, telemetry, metrics, kv, segments, loaded, store, memory, closers)
        application.closers.push(closers.pop_all())
        return application


def _open_side_by_side(
    settings: Settings, files: ModelFiles, telemetry: Telemetry, closers: contextlib.ExitStack
) -> tuple[DiskKVStore | None, DiskKVStore | None, LoadedModel, Store]:
    """Open the slow things at once; `closers` gets each one that opened, even if another fails."""
    share = SEGMENT_QUOTA_SHARE if tiered(settings) else 0.0
    jobs: tuple[Callable[[], object], ...] = (
        lambda: _open_kv(settings, telemetry, KV_FOLDER, 1 - share),
        lambda: _open_kv(settings, telemetry, SEGMENT_FOLDER, share),
        lambda: _load(settings, files),
        lambda: _open_store(settings),
    )
    with ThreadPoolExecutor(len(jobs), "build") as pool:
        futures = [pool.submit(job) for job in jobs]
    for future in futures:
        if future.exception() is None and (opened := future.result()) is not None:
            closers.callback(opened.close)  # type: ignore[attr-defined]
    kv, segments, loaded, store = (future.result() for future in futures)
    return kv, segments, loaded, store  # type: ignore[return-value]


def _open_kv(settings: Settings, telemetry: Telemetry, folder: str, share: float) -> DiskKVStore | None:
    from perilune.runtime.kv.disk import DiskKVStore

    quota = int(settings.kv_cache.disk_quota * share) if settings.runtime.backend == "torch" else 0
    return DiskKVStore(settings.home / folder, quota, telemetry) if quota else None


def tiered(settings: Settings) -> bool:
    """Some tenant's KV is kept in tiers."""
    return "tiered" in (settings.kv_cache.policy, *settings.kv_cache.tenants.values())


def tier_settings(kv: KVCacheSettings, folder: Path) -> TierSettings | None:
    """What the loader is told of tiers; None where everybody's policy is full. COLD lies in `folder`."""
    from perilune.runtime.kv.sizing import TierSettings

    if "tiered" not in (kv.policy, *kv.tenants.values()):
        return None
    hot = kv.hot_size if kv.warm_compress else kv.hot_size + kv.warm_size
    return TierSettings(hot, spill_bytes=kv.spill if kv.cold_summary else 0, spill_folder=folder)


def _load(settings: Settings, files: ModelFiles) -> LoadedModel:
    return (
        _load_llamacpp(settings, files) if settings.runtime.backend == "llamacpp" else _load_torch(settings, files)
    )


def _load_llamacpp(settings: Settings, files: ModelFiles) -> LoadedModel:
    """Raises `ConfigError` for settings that llama.cpp, which computes with weights as stored, can't follow."""
    from perilune.runtime.llamacpp_loader import load_llamacpp

    for key, value, kept in (
        ("model.dtype", settings.model.dtype, ("bf16",)),
        ("model.decode_weights", settings.model.decode_weights, ("auto", "stored")),
        ("model.lora", settings.model.lora, ("",)),
        ("kv_cache.policy", "tiered" if tiered(settings) else "full", ("full",)),
    ):
        if value not in kept:
            raise ConfigError(
                f"{key} is {value}; llama.cpp computes with the weights as the file stores them.",
                hint=f"Leave {key} at {kept[0] or 'nothing'}, or set runtime.backend to torch.",
                param=key,
            )
    return load_llamacpp(
        files.path, kv_bytes=settings.kv_cache.ram, threads=settings.runtime.threads, model_id=files.card.name
    )


def _load_torch(settings: Settings, files: ModelFiles) -> LoadedModel:
    from perilune.runtime.loader import load_model
    from perilune.runtime.torch_runtime import TorchRuntime

    loaded = load_model(
        files.path,
        dtype=settings.model.dtype,
        decode_weights=settings.model.decode_weights,
        kv_bytes=settings.kv_cache.ram,
        tiers=tier_settings(settings.kv_cache, settings.home),
        threads=settings.runtime.threads,
        model_id=served_name(settings, files),
        lora=Path(settings.model.lora).expanduser() if settings.model.lora else None,
    )
    runtime = loaded.runtime
    if settings.runtime.cache_warmup and isinstance(runtime, TorchRuntime):
        # A restored document is half as late when its pages are there; meanwhile the rest of the start goes on.
        window = runtime.max_context_tokens
        threading.Thread(target=runtime.populate_pool, args=(window,), name="pool", daemon=True).start()
    return loaded


def _open_store(settings: Settings) -> Store:
    from perilune.memory.store import Store

    return Store(settings.home, settings.database)


def _open_memory(settings: Settings, store: Store, closers: contextlib.ExitStack) -> Memory:
    from perilune.memory.memory import Memory

    memory = Memory.open(store, settings.home, settings.memory)
    closers.callback(memory.close)
    return memory


def _wire(
    settings: Settings,
    files: ModelFiles,
    telemetry: Telemetry,
    metrics: PrometheusSink,
    kv: DiskKVStore | None,
    segments: DiskKVStore | None,
    loaded: LoadedModel,
    store: Store,
    memory: Memory | None,
    closers: contextlib.ExitStack,
) -> Application:
    from perilune.engine.loop import EngineLoop
    from perilune.engine.policy import EngineLimits
    from perilune.memory.keys import Keyring
    from perilune.memory.library import Library
    from perilune.memory.ratings import Ratings
    from perilune.memory.sessions import Sessions
    from perilune.memory.usage import UsageStore
    from perilune.memory.vector_stores import VectorStores
    from perilune.service.predictor import Predictor

    spec = loaded.runtime.kv_spec
    keys = Keyring(store, settings.home)
    library = Library(store, settings.home, settings.documents, counted_by=spec.fingerprint, memory=memory)
    predictor = Predictor(
        _rates_file(settings.home, loaded.info, settings.runtime.threads), telemetry, spec.token_bytes
    )
    limits = EngineLimits(
        batch=settings.runtime.max_batch_size,
        chunk_tokens=settings.runtime.prefill_chunk_size,
        queue=settings.server.max_queue,
    )
    engine = EngineLoop(
        loaded.runtime,
        kv,
        limits,
        telemetry,
        predictor,
        segment_store=segments,
        tier_policy=_tier_policy(settings),
        policy=_scheduling(settings.scheduler, telemetry),
    )
    closers.callback(engine.close)
    model = served_model(settings, files, loaded)
    stores = [store for store in (kv, segments) if store is not None]
    kept = Sessions(store, memory) if memory is not None else None
    usage = UsageStore(store)
    answers = _answers(settings, store) if memory is not None else None
    ratings = Ratings(store, memory.marks) if memory is not None else None
    service = _service(
        settings,
        telemetry,
        store,
        stores,
        loaded,
        keys,
        usage,
        library,
        kept,
        answers,
        ratings,
        VectorStores(store),
        predictor,
        engine,
        model,
        memory,
    )
    metrics.before_render(lambda: _gauges(engine, telemetry))
    described, later = loaded.info.kernels, contextlib.ExitStack()
    return Application(
        settings, telemetry, metrics, service, library, keys, engine, model, described, later, memory
    )


def _answers(settings: Settings, store: Store) -> ResponseStore:
    """Kept answers. One process owns a home: what it left unfinished is told by the home's name."""
    from perilune.memory.responses import ResponseStore

    runner = hashlib.sha256(str(settings.home.resolve()).encode()).hexdigest()[:32]
    return ResponseStore(store, runner=runner, quota_bytes=settings.memory.responses_quota)


def _service(
    settings: Settings,
    telemetry: Telemetry,
    store: Store,
    stores: Sequence[DiskKVStore],
    loaded: LoadedModel,
    keys: Keyring,
    usage: UsageStore,
    library: Library,
    kept: Sessions | None,
    answers: ResponseStore | None,
    ratings: Ratings | None,
    sets: VectorStores,
    predictor: Predictor,
    engine: EngineLoop,
    model: ServedModel,
    memory: Memory | None,
) -> Service:
    from perilune.memory.language import detect
    from perilune.memory.uploads import UploadStore
    from perilune.runtime.kv.spec import tenant_salt
    from perilune.service.abstain import Abstain
    from perilune.service.admission import Admission
    from perilune.service.answer import Parts
    from perilune.service.archive import Archive
    from perilune.service.backends.local import LocalBackend
    from perilune.service.compose import Composer
    from perilune.service.documents import DocumentService
    from perilune.service.kv_health import KVHealth
    from perilune.service.ledger import Ledger
    from perilune.service.ratings import RatingService
    from perilune.service.retention import Retention
    from perilune.service.service import Service
    from perilune.service.sessions import SessionService
    from perilune.service.thinking import style_of
    from perilune.service.tools.formats import format_of
    from perilune.service.uploads import UploadService
    from perilune.service.vector_stores import VectorStoreService

    backend = LocalBackend(engine)
    notation = format_of(loaded.chat_template.source if loaded.chat_template is not None else "")
    composer = Composer(loaded.tokenizer, loaded.chat_template, model.window_tokens, notation.result_role)

    def kv_of(tenant: str) -> KVPolicy:
        return KVPolicy(settings.kv_cache.tenants.get(tenant, settings.kv_cache.policy))

    def salt_of(tenant: str) -> bytes:
        tiers = loaded.runtime.tiers if kv_of(tenant) is KVPolicy.TIERED else None
        return tenant_salt(keys.tenant_secret(tenant), loaded.runtime.kv_spec, tiers.spec if tiers else None)

    def owners() -> list[str]:
        return list({entry.owner for store in stores for entry in store.entries()})

    def forget(part: str) -> None:
        caches.forget(part)
        batches.wake()

    disk_bytes = settings.kv_cache.disk_quota if stores else 0
    kept_bytes = disk_bytes or loaded.runtime.num_blocks * loaded.runtime.kv_spec.block_bytes
    documents = DocumentService(
        library,
        composer,
        backend,
        salt_of,
        owners,
        model.window_tokens,
        kept_bytes // loaded.runtime.kv_spec.token_bytes,
        settings.server.max_upload,
        telemetry,
        kv_of,
        forget,
    )
    caches = _caches(settings, documents, memory.vector if memory is not None else None, telemetry)
    sessions, departure = SessionService(kept, documents.forget_kv, telemetry), _departure(settings, telemetry)
    parts = Parts(
        model=model,
        tokenizer=loaded.tokenizer,
        composer=composer,
        grammars=loaded.grammars,
        tool_format=notation,
        library=library,
        documents=documents,
        sessions=sessions,
        backend=backend,
        predictor=predictor,
        salt_of=salt_of,
        detect_language=detect,
        limits=_limits(settings),
        web=_web(settings, documents, sessions, departure),
        clock=time.monotonic,
        telemetry=telemetry,
        kv_of=kv_of,
        preset=settings.attention.preset,
        abstain=Abstain(settings.memory.abstain),
        thinking=style_of(loaded.chat_template, loaded.chat_template.source if loaded.chat_template else ""),
    )
    places = settings.server.max_queue + settings.runtime.max_batch_size
    backends = _backends(settings, parts, departure)
    limits = KeyLimits(**{name: value or None for name, value in settings.limits.model_dump().items()})
    ledger = Ledger(usage, limits, backends.routes.price, parts.clock, time.time, telemetry)
    admission, view = Admission(places, telemetry), KVHealth(engine, settings)
    keep = (settings.documents.keep_days, settings.memory.keep_days)
    archive, feedback = Archive(answers), RatingService(ratings, parts.sessions, telemetry)
    stores_of_files = VectorStoreService(sets, library)
    uploads = UploadService(UploadStore(store, settings.home), documents, settings.server.max_upload)
    batches = _batches(settings, store, documents, library, keys, telemetry)
    sweeps = Retention(documents, parts.sessions, archive, feedback, uploads, *keep)
    retention = sweeps if kept is not None else None
    authenticate, known = _authenticator(keys)
    return Service(
        parts,
        admission,
        authenticate,
        view,
        backends,
        ledger,
        archive,
        feedback,
        stores_of_files,
        caches,
        uploads,
        batches,
        known,
        retention,
        _machine(settings, loaded, model, predictor).view,
        memory,
    )


def _machine(settings: Settings, loaded: LoadedModel, model: ServedModel, predictor: Predictor) -> Machine:
    from perilune.service.machine import LoadedFacts, Machine

    blocks, spec = loaded.runtime.num_blocks, loaded.runtime.kv_spec
    facts = LoadedFacts(
        parameters=loaded.info.parameters,
        trained_tokens=loaded.info.max_context_tokens,
        kv_bytes=blocks * spec.block_bytes,
        kv_tokens=blocks * BLOCK_TOKENS,
        kernels=loaded.info.kernels,
        threads=settings.runtime.threads or len(os.sched_getaffinity(0)),
    )
    return Machine(settings, model, facts, predictor)


def _batches(
    settings: Settings,
    store: Store,
    documents: DocumentService,
    library: Library,
    keys: Keyring,
    telemetry: Telemetry,
) -> BatchService:
    from perilune.memory.batches import Batch, BatchStore
    from perilune.service.batch.lines import InputLimits
    from perilune.service.batch.queue import BatchQueue
    from perilune.service.batch.runner import BatchRunner
    from perilune.service.batch.service import BatchService

    given, rows = settings.batch, BatchStore(store)

    def caller_of(batch: Batch) -> Caller | None:
        if batch.key_id is None:
            return Caller(batch.tenant, "user")
        owner = keys.owner(batch.key_id)
        return None if owner is None else _caller(owner)

    limits = InputLimits(given.max_lines, settings.server.max_body, given.max_input)
    concurrency = given.concurrency or settings.runtime.max_batch_size
    runner = BatchRunner(rows, library, caller_of, limits, concurrency, telemetry)
    queue = BatchQueue(runner, settings.home, settings.database)
    return BatchService(rows, runner, queue, documents, given.max_open)


def _caches(
    settings: Settings, documents: DocumentService, vectors: Vectors | None, telemetry: Telemetry
) -> AnswerCaches:
    """Raises `ConfigError` for likeness without an embedder, and for a bad file of curated answers."""
    from perilune.service.caches.answers import AnswerCaches, CachePolicy
    from perilune.service.caches.faq import CuratedAnswers

    given = settings.answer_cache
    if given.semantic and settings.memory.embedder == "off":
        raise ConfigError(
            "answer_cache.semantic compares questions by an embedder, and memory.embedder is off.",
            hint="Set memory.embedder, or answer_cache.exact instead.",
            param="answer_cache.semantic",
        )
    policy = CachePolicy(given.exact, given.semantic, given.ttl_s, given.tenant_quota, given.likeness)
    curated = CuratedAnswers(Path(given.faq).expanduser()) if given.faq else None
    return AnswerCaches(policy, documents, curated, vectors, time.monotonic, telemetry)


def _web(
    settings: Settings, documents: DocumentService, sessions: SessionService, departure: Deidentified
) -> WebSearch:
    from perilune.service.backends.searxng import SearXNG
    from perilune.service.web_search import WebSearch

    given = settings.web_search
    engine = SearXNG(given.url, departure, given.timeout) if given.url else None
    return WebSearch(engine, documents, sessions)


def _backends(settings: Settings, parts: Parts, departure: Deidentified) -> Backends:
    """The local engine and every configured backend as targets of one router. Raises `ConfigError`."""
    from perilune.service.backends.health import Health, HealthRules
    from perilune.service.backends.local_chat import LocalChat
    from perilune.service.backends.openai import OpenAIBackend
    from perilune.service.pool import Backends
    from perilune.service.routed import Routes
    from perilune.service.routing import Prices, Router, Target

    routing, check = settings.routing, settings.model_serving.health_check
    rules = HealthRules(routing.eject_after, routing.eject)
    local = LocalChat(
        parts.model,
        parts.backend,
        parts.composer,
        parts.tokenizer,
        parts.predictor,
        parts.salt_of,
        parts.kv_of,
        settings.model_serving.timeout,
    )
    targets = [
        Target(
            local,
            parts.model.model_id,
            Health(rules, local.window_tokens, parts.clock),
            most_calls=settings.server.max_queue,
            continues=True,
            remote=False,
        )
    ]
    for given in settings.backends:
        trusted = given.name in settings.privacy.trusted
        backend = OpenAIBackend(_address(given, check.timeout), None if trusted else departure)
        targets.append(
            Target(
                backend,
                given.serves or given.model,
                Health(rules, given.context_tokens, parts.clock),
                Prices(given.prompt_cost, given.completion_cost, given.cached_cost),
                given.max_concurrency,
                given.continues,
            )
        )
    names = [target.name for target in targets]
    if double := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"Two backends are called {double[0]!r}.", hint="Give each its own name.", param="backends"
        )
    served = {target.serves for target in targets} | parts.model.aliases
    for chain in routing.fallbacks:
        if unknown := [name for name in chain if name not in served]:
            raise ConfigError(
                f"routing.fallbacks names the model {unknown[0]!r}, which nothing here serves.",
                hint=f"Served are {', '.join(sorted(served))}.",
                param="routing.fallbacks",
            )
    router = Router(targets, parts.clock, parts.telemetry)
    return Backends(Routes(router, routing.fallbacks), check.interval, parts.clock, parts.telemetry)


def _departure(settings: Settings, telemetry: Telemetry) -> Deidentified:
    """What takes identifiers out of text for backends. Raises `ConfigError` for kinds and backends that don't
    exist."""
    from perilune.service.privacy.departure import Deidentified, Policy
    from perilune.service.privacy.kinds import Kind, Treatment

    privacy, kinds = settings.privacy, {kind.value for kind in Kind if kind is not Kind.TEXT}
    backends = {given.name for given in settings.backends}
    for key, unknown, known in (
        ("kinds", privacy.kinds.keys() - kinds, kinds),
        ("trusted", set(privacy.trusted) - backends, backends),
    ):
        if unknown:
            raise ConfigError(
                f"privacy.{key} names {sorted(unknown)[0]!r}, which there isn't.",
                hint=f"Known are {', '.join(sorted(known)) or 'none'}.",
                param=f"privacy.{key}",
            )
    treatments = {Kind(kind): Treatment(treatment) for kind, treatment in privacy.kinds.items()}
    departure = Deidentified(Policy(treatments, privacy.terms, frozenset(privacy.local_only)), telemetry)
    if settings.backends or settings.web_search.url:
        departure.prepare()
    return departure


def _address(given: BackendSettings, probe_s: float) -> Address:
    """Raises `ConfigError` for a key that isn't in the environment, and for a bad URL."""
    from perilune.service.backends.openai import Address

    key = os.environ.get(given.key_env, "") if given.key_env else ""
    if given.key_env and not key:
        raise ConfigError(
            f"Backend {given.name}: the environment variable {given.key_env} is not set.",
            hint="Set it to the API key, or leave key_env out.",
            param="backends",
        )
    return Address(
        given.name,
        given.url,
        given.model,
        given.context_tokens,
        key,
        given.connect_timeout,
        given.silence,
        probe_s,
    )


def _tier_policy(settings: Settings) -> TierPolicy:
    from perilune.engine.stepper import TierPolicy
    from perilune.service.presets import presets

    attention, kv = settings.attention, settings.kv_cache
    named = presets(attention.window_size, attention.sparse_topk, attention.summary_weight)
    warm_tokens = kv.warm_size if kv.warm_compress else 0
    return TierPolicy(warm_tokens, named, attention.adaptive_window, attention.debug)


def _scheduling(settings: SchedulerSettings, telemetry: Telemetry) -> SchedulingPolicy:
    from perilune.engine.trial import Trial

    acting = settings.experiment or (settings.policy,)
    if settings.experiment and settings.shadow:
        raise ConfigError(
            "scheduler.shadow and scheduler.experiment can't both be set.", hint="Compare first, then let them act."
        )
    names = dict.fromkeys((*acting, *settings.shadow))
    if len(names) == 1:
        return _policy(acting[0], settings)
    slot_s = settings.experiment_slot if settings.experiment else None
    return Trial({name: _policy(name, settings) for name in names}, telemetry, time.monotonic, slot_s)


def _policy(name: str, settings: SchedulerSettings) -> SchedulingPolicy:
    from perilune.engine import deadlines, scheduling

    if name == "fcfs":
        return scheduling.FirstComeFirstServed()
    if name == "edf":
        return scheduling.EarliestDeadlineFirst()
    if name == "static":
        return scheduling.StaticPriority(settings.kv_reserve)
    return deadlines.DeadlinePolicy(
        deadlines.DeadlineSettings(
            reserve=settings.kv_reserve,
            tenant_share=settings.tenant_kv_share,
            lead=settings.tenant_lead,
            late=settings.late,
        )
    )


def _limits(settings: Settings) -> Limits:
    from perilune.service.answer import Limits

    deadlines = settings.deadlines
    return Limits(
        deadlines.interactive_s, deadlines.document_s, deadlines.reserve_s, settings.model_serving.timeout
    )


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


def served_name(settings: Settings, files: ModelFiles) -> str:
    """The model's name, and behind a plus that of the adapter merged into it."""
    name, lora = files.card.name, settings.model.lora
    return f"{name}+{Path(lora).expanduser().resolve().name}" if lora else name


def served_model(settings: Settings, files: ModelFiles, loaded: LoadedModel) -> ServedModel:
    """What requests may call the model, and what is known of it from the catalogue and the file."""
    card, name = files.card, served_name(settings, files)
    aliases = {
        card.name,
        *card.aliases,
        settings.model.path,
        files.path.name,
        files.path.name.removesuffix(".gguf"),
    }
    blocks, tiers = loaded.runtime.num_blocks, loaded.runtime.tiers
    longest = blocks * BLOCK_TOKENS
    if tiers is not None and KVPolicy(settings.kv_cache.policy) is KVPolicy.TIERED:
        longest = tiers.spec.slots * tiers.spec.segment_tokens
    return ServedModel(
        model_id=name,
        window_tokens=min(loaded.info.max_context_tokens, longest),
        licence=card.licence,
        created_at=int(files.path.stat().st_mtime),
        vocab_size=loaded.info.vocab_size,
        aliases=frozenset(aliases - {name}),
        languages=frozenset(card.languages or loaded.info.languages),
        effective=read_length(settings.home, loaded.info.content) if loaded.info.content else None,
        file_bytes=files.size_bytes,
    )


def _rates_file(home: Path, info: ModelInfo, threads: int) -> Path:
    """Where the speeds of this model are kept, as these weights, kernels and threads run it."""
    threads = threads or len(os.sched_getaffinity(0))
    setting = f"{info.fingerprint}|{info.weights_resident}|{info.kernels}|{threads}"
    return home / f"rates-{hashlib.sha256(setting.encode()).hexdigest()[:16]}.json"


def _gauges(engine: EngineLoop, telemetry: Telemetry) -> None:
    """What `/metrics` asks the engine for when it is read."""
    stats = engine.stats()
    telemetry.gauge("sequences_running", float(stats.running))
    telemetry.gauge("sequences_waiting", float(stats.waiting))
    telemetry.gauge("queued_prefill_tokens", float(stats.queued_prefill_tokens))
    used = 1 - stats.free_blocks / stats.total_blocks if stats.total_blocks else 0.0
    telemetry.gauge("kv_cache_usage_ratio", used)
    use = engine.kv_use()
    for tier, size in (
        ("hot", use.hot_bytes),
        ("warm", use.warm_bytes),
        ("cold", use.cold_bytes),
        ("summary", use.summary_bytes),
    ):
        telemetry.gauge("kv_tier_bytes", float(size), tier=tier)
    telemetry.gauge("kv_idle_bytes", float(use.idle_bytes))
    telemetry.gauge("kv_limit_bytes", float(use.limit_bytes))
    telemetry.gauge("kv_fragmentation_ratio", use.fragmentation)
    telemetry.gauge("warm_compression_ratio", use.warm_compression)
    telemetry.gauge("kv_pressure", float(use.level))
