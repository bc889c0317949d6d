"""/v1/models and /v1/backends: what can be asked here. Knows the wire form of a model card, not models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from perilune.api.wire import json_response
from perilune.errors import ModelNotFound
from perilune.service.ports import ModelCard, ServiceApi


def model_dict(card: ModelCard) -> dict[str, Any]:
    """OpenAI's model object; the window in vLLM's spelling, so that clients that size prompts find it."""
    return {
        "id": card.model_id,
        "object": "model",
        "created": card.created_at,
        "owned_by": "perilune",
        "max_model_len": card.max_context_tokens,
        "licence": card.licence,
    }


class Models:
    def __init__(self, service: ServiceApi) -> None:
        self._service = service

    async def list(self, request: Request) -> Response:
        cards = await self._service.models()
        return json_response({"object": "list", "data": [model_dict(card) for card in cards]})

    async def backends(self, request: Request) -> Response:
        """What answers here, and how each of it is (role admin only, `auth.ADMIN_PATHS`)."""
        return json_response({"object": "list", "data": self._service.backends.view()})

    async def retrieve(self, request: Request) -> Response:
        """Raises `ModelNotFound`."""
        for card in await self._service.models():
            if card.model_id == request.path_params["model"]:
                return json_response(model_dict(card))
        raise ModelNotFound(
            "This server has no such model.", hint="GET /v1/models lists what it serves.", param="model"
        )
