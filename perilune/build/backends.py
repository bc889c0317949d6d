"""The backends: the local engine and every configured URL as targets of one router, and what takes identifiers
out of text on its way to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perilune.api_keys import api_key
from perilune.config import BackendSettings, Settings
from perilune.errors import ConfigError
from perilune.telemetry import Telemetry

if TYPE_CHECKING:
    from perilune.service.backends.health import HealthRules
    from perilune.service.backends.openai import Address
    from perilune.service.parts import Parts
    from perilune.service.pool import Backends
    from perilune.service.privacy.departure import Deidentified
    from perilune.service.routing import Target


def backends(settings: Settings, parts: Parts, departure: Deidentified) -> Backends:
    """The local engine and every configured backend as targets of one router.

    Raises `ConfigError` for names given twice, and for fallbacks that nothing serves.
    """
    from perilune.service.backends.health import HealthRules
    from perilune.service.pool import Backends
    from perilune.service.routed import Routes
    from perilune.service.routing import Router

    routing, check = settings.routing, settings.model_serving.health_check
    rules = HealthRules(routing.eject_after, routing.eject)
    targets = [_local(settings, parts, rules)]
    targets += [_remote(settings, given, parts, rules, departure) for given in settings.backends]
    _check_names(settings, parts, targets)
    router = Router(targets, parts.clock, parts.telemetry)
    return Backends(Routes(router, routing.fallbacks), check.interval, parts.clock, parts.telemetry)


def _local(settings: Settings, parts: Parts, rules: HealthRules) -> Target:
    from perilune.service.backends.health import Health
    from perilune.service.backends.local_chat import LocalChat
    from perilune.service.routing import Target

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
    return Target(
        local,
        parts.model.model_id,
        Health(rules, local.window_tokens, parts.clock),
        most_calls=settings.server.max_queue,
        continues=True,
        remote=False,
    )


def _remote(
    settings: Settings, given: BackendSettings, parts: Parts, rules: HealthRules, departure: Deidentified
) -> Target:
    from perilune.service.backends.health import Health
    from perilune.service.backends.openai import OpenAIBackend
    from perilune.service.routing import Prices, Target

    trusted = given.name in settings.privacy.trusted
    address = _address(given, settings.model_serving.health_check.timeout)
    return Target(
        OpenAIBackend(address, None if trusted else departure),
        given.serves or given.model,
        Health(rules, given.context_tokens, parts.clock),
        Prices(given.prompt_cost, given.completion_cost, given.cached_cost),
        given.max_concurrency,
        given.continues,
    )


def _check_names(settings: Settings, parts: Parts, targets: list[Target]) -> None:
    names = [target.name for target in targets]
    if double := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"Two backends are called {double[0]!r}.", hint="Give each its own name.", param="backends"
        )
    served = {target.serves for target in targets} | parts.model.aliases
    for chain in settings.routing.fallbacks:
        if unknown := [name for name in chain if name not in served]:
            raise ConfigError(
                f"routing.fallbacks names the model {unknown[0]!r}, which nothing here serves.",
                hint=f"Served are {', '.join(sorted(served))}.",
                param="routing.fallbacks",
            )


def _address(given: BackendSettings, probe_s: float) -> Address:
    """Raises `ConfigError` for a key that isn't in the environment, and for a bad URL."""
    from perilune.service.backends.openai import Address

    key = api_key(given.key_env, whose=f"Backend {given.name}", param="backends")
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


def departure_of(settings: Settings, telemetry: Telemetry) -> Deidentified:
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
