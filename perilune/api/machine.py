"""/v1/machine: what runs here and how well it fits. Knows the wire and roles; the figures are the service's."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from perilune.api.auth import caller_of
from perilune.api.wire import json_response
from perilune.service.ports import ServiceApi


class MachineRoute:
    def __init__(self, service: ServiceApi) -> None:
        self._service = service

    async def show(self, request: Request) -> Response:
        """GET. Commands that mend something are for whoever runs the server: they may name its folders."""
        found = await asyncio.to_thread(self._service.machine)
        if caller_of(request.scope).role != "admin":
            found = {**found, "checks": [{**check, "fix": ""} for check in found["checks"]]}
        return json_response(found)
