"""/health, /ready, /version, /metrics: for supervisors, load balancers and Prometheus.

Health says that the process answers; ready says that it can take work. Neither needs a key or tells a secret.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

import perilune
from perilune.api.errors import RETRY_AFTER_S
from perilune.api.wire import json_response
from perilune.ops.metrics import CONTENT_TYPE, PrometheusSink
from perilune.service.ports import ServiceApi


class Health:
    def __init__(self, service: ServiceApi, metrics: PrometheusSink) -> None:
        self._service = service
        self._metrics = metrics

    async def health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """503 while the model loads or the engine is down."""
        if await self._service.ready():
            return json_response({"status": "ready"})
        response = json_response({"status": "not ready"}, 503)
        response.headers["retry-after"] = str(RETRY_AFTER_S)
        return response

    async def version(self, request: Request) -> Response:
        return json_response({"version": perilune.__version__})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)
