"""POST /v1/estimate: the plan and the predicted TTFT of a chat request before it runs (spec S9).

Knows the wire: the body is that of /v1/chat/completions, and nothing of it runs. The plan is the service's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from perilune.api.auth import caller_of
from perilune.api.limits import read_body
from perilune.api.schema import parse_chat
from perilune.api.wire import json_response
from perilune.config import Settings
from perilune.core import Plan
from perilune.service.ports import ServiceApi


class Estimates:
    """`clock` is the monotonic clock of `core.Request.arrival_s`."""

    def __init__(
        self, service: ServiceApi, settings: Settings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._service = service
        self._settings = settings
        self._clock = clock

    async def estimate(self, request: Request) -> Response:
        """Raises what a chat request of this body raises before its answer begins."""
        call = parse_chat(
            await read_body(request.scope, request.receive, self._settings.server.max_body),
            request_id=request.scope["state"]["request_id"],
            caller=caller_of(request.scope),
            arrival_s=self._clock(),
            settings=self._settings,
        )
        plan = await self._service.estimate(call.request)
        return json_response({"object": "estimate", "model": call.request.model, **_shown(plan)})


def _shown(plan: Plan) -> dict[str, Any]:
    return {
        "plan": plan.kind.value,
        "deadline_s": plan.deadline_s,
        "predicted_ttft_s": round(plan.predicted_ttft_s, 4),
        "bound_ttft_s": round(plan.bound_ttft_s, 4),
        "in_time": plan.bound_ttft_s <= plan.deadline_s,
        "fidelity": round(plan.fidelity, 4),
        "prompt_tokens": plan.context_tokens,
        "cached_tokens": plan.context_tokens - plan.uncached_tokens,
        "degradations": [{"code": item.code, "reason": item.reason} for item in plan.degradations],
    }
