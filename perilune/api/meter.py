"""What one answer cost and how fast it was, measured where the client is.

Knows events and the clock; reports through telemetry, and writes one line of log an answer, with numbers only, that
`perilune simulate` reads. TTFT and deadlines are the service's to report, because they are part of its promise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from perilune.api.errors import ClientGone
from perilune.core import ChoiceFinished, Completed, Event, Planned, Request, TextDelta
from perilune.errors import PeriluneError
from perilune.telemetry import Telemetry

log = logging.getLogger("perilune.api")


class AnswerMeter:
    """Sees every event of one answer, then is told how it ended."""

    def __init__(
        self,
        telemetry: Telemetry,
        clock: Callable[[], float],
        request: Request,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._telemetry = telemetry
        self._clock = clock
        self._wall = wall
        self._request = request
        self._first_s: float | None = None
        self._last_s = 0.0

    def see(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self._last_s = self._clock()
            if self._first_s is None:
                self._first_s = self._last_s
        elif isinstance(event, Planned):
            self._telemetry.count("plans", plan=event.plan.kind.value)
        elif isinstance(event, ChoiceFinished):
            self._telemetry.count("choices_finished", finished_reason=event.reason.value)
        elif isinstance(event, Completed):
            self._completed(event)

    def ended(self, error: BaseException | None) -> None:
        """Count the outcome: `completed`, the code of an error, `disconnected`, `server_stopped` or `failed`."""
        if error is None:
            outcome = "completed"
        elif isinstance(error, PeriluneError):
            outcome = error.code
        elif isinstance(error, ClientGone):
            outcome = "disconnected"
        else:
            outcome = "server_stopped" if isinstance(error, asyncio.CancelledError) else "failed"
        self._telemetry.count("answers", outcome=outcome)

    def _completed(self, event: Completed) -> None:
        usage = event.usage
        self._telemetry.count("prompt_tokens", usage.prompt_tokens)
        self._telemetry.count("generation_tokens", usage.completion_tokens)
        self._telemetry.count("cached_prompt_tokens", usage.cached_tokens)
        self._telemetry.observe("request_prompt_tokens", usage.prompt_tokens)
        spent_s = self._clock() - self._request.arrival_s
        self._telemetry.observe("answer_seconds", spent_s)
        fields = {
            "request_id": self._request.request_id,
            "arrival_s": round(self._wall() - spent_s, 3),
            "prompt_tokens": usage.prompt_tokens,
            "new_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "service_class": f"P{self._request.service_class.value}",
            "tenant": self._request.tenant,
            "deadline_s": event.report.deadline_s,
            "ttft_s": event.report.measured_ttft_s,
        }
        log.info("answer", extra={"fields": fields})
        steps = usage.completion_tokens / self._request.n - 1
        if self._first_s is not None and steps >= 1:
            self._telemetry.observe("time_per_output_token_seconds", (self._last_s - self._first_s) / steps)
