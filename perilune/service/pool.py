"""The configured backends while the service runs: their router, their probes, what is told of them.

Knows targets and time; doesn't know requests. One task probes: who is in service every `interval_s` unless it has
just answered, who is out of it every second, so that a backend that came back is used within seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from perilune.service.backends.protocol import BackendFault
from perilune.service.model import ServedModel
from perilune.service.ports import ModelCard
from perilune.service.routed import Routes
from perilune.service.routing import Target
from perilune.telemetry import Telemetry

PROBE_EJECTED_S = 1.0


class Backends:
    """Implements `ports.BackendsView`. Used from the event loop; `start` before the first request, `close` at the
    end."""

    def __init__(self, routes: Routes, interval_s: float, clock: Callable[[], float], telemetry: Telemetry) -> None:
        self.routes = routes
        self._interval_s = interval_s
        self._clock = clock
        self._telemetry = telemetry
        self._probing: asyncio.Task[None] | None = None
        self._asked_s: dict[str, float] = {}

    @property
    def _remote(self) -> list[Target]:
        """All but the engine of this process, which needs no probe."""
        return [target for target in self.routes.router.targets if target.remote]

    def start(self) -> None:
        if self._remote and self._probing is None:
            self._probing = asyncio.create_task(self._probe_for_ever(), name="probe backends")

    async def close(self) -> None:
        task, self._probing = self._probing, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        for target in self.routes.router.targets:
            await target.backend.close()

    def cards(self, local: ServedModel) -> list[ModelCard]:
        """The models that backends serve, once each, with the longest window among them."""
        found: dict[str, ModelCard] = {}
        for target in self._remote:
            known = found.get(target.serves)
            window = max(target.health.window_tokens, known.max_context_tokens if known else 0)
            if not local.means(target.serves):
                found[target.serves] = ModelCard(target.serves, local.created_at, window, "")
        return list(found.values())

    def view(self) -> list[dict[str, Any]]:
        """The state of each, as JSON values."""
        return [_state(target) for target in self.routes.router.targets]

    # -------------------------------------------------------------------------------------------- probes

    async def _probe_for_ever(self) -> None:
        while True:
            due = [target for target in self._remote if self._due(target)]
            await asyncio.gather(*(self._probe(target) for target in due))
            for target in self._remote:
                self._telemetry.gauge("backend_available", float(target.health.available), backend=target.name)
            await asyncio.sleep(min(PROBE_EJECTED_S, self._interval_s))

    def _due(self, target: Target) -> bool:
        health, now_s = target.health, self._clock()
        if health.cooling:
            return False
        seen_s = max(health.last_ok_s, self._asked_s.get(target.name, float("-inf")))
        return not health.available or now_s - seen_s >= self._interval_s

    async def _probe(self, target: Target) -> None:
        self._asked_s[target.name] = self._clock()
        outcome = "answered"
        try:
            await target.backend.probe()
            target.health.probed()
        except BackendFault as fault:
            outcome = fault.kind.value
            target.health.failed(fault)
        self._telemetry.count("backend_probes", backend=target.name, outcome=outcome)


def _state(target: Target) -> dict[str, Any]:
    health = target.health
    out = not health.available
    return {
        "name": target.name,
        "model": target.backend.model_id,
        "serves": target.serves,
        "available": not out,
        "reason": health.reason.value if out and health.reason is not None else None,
        "back_in_s": round(health.back_in_s, 1),
        "in_flight": health.in_flight,
        "max_concurrency": target.most_calls,
        "window_tokens": health.window_tokens,
        "claimed_window_tokens": target.backend.window_tokens,
        "ttft_s": round(health.ttft_s(0), 4),
        "ttft_s_per_token": health.rates.prefill_s_per_token,
    }
