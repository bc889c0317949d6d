"""POST /v1/embeddings: what texts mean, as vectors of the embedder that memory works with (OpenAI's Embeddings).

Knows the wire; the embedder is memory's. Token ids are refused: clients make them with other models' tokenizers,
and the vectors would silently be of another text. So are texts that are longer than the embedder reads."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from perilune.api.auth import caller_of
from perilune.api.errors import Unsupported
from perilune.api.fields import IGNORED_HEADER, check_fields, ignored_fields
from perilune.api.limits import parse_json_object, read_body
from perilune.api.responses_request import validated
from perilune.api.schema import ModelName, as_list
from perilune.api.wire import Wire, json_response
from perilune.config import Settings
from perilune.core import Message, TextPart
from perilune.core import Request as Question
from perilune.errors import InvalidRequest
from perilune.service.ports import ServiceApi

MAX_TEXTS = 2048
"""As the dialect has it."""

Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_TEXTS)]


class WireEmbedding(Wire):
    """The body. `input_type` is ours (and Cohere's, NVIDIA's): some models embed questions and texts
    differently."""

    model: ModelName
    input: Annotated[Texts, BeforeValidator(as_list, json_schema_input_type=str | Texts)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    input_type: Literal["query", "passage"] | None = None


class Embeddings:
    """The endpoint."""

    def __init__(self, service: ServiceApi, settings: Settings) -> None:
        self._service = service
        self._max_body_bytes = settings.server.max_body

    async def create(self, request: Request) -> Response:
        """Raises `Unsupported` for token ids, `InvalidRequest` for a number of dimensions that the embedder doesn't
        give, and as `ports.ServiceApi.embed`."""
        raw = parse_json_object(await read_body(request.scope, request.receive, self._max_body_bytes))
        check_fields("embeddings", raw)
        _refuse_tokens(raw.get("input"))
        wire = validated(WireEmbedding, raw)
        caller = caller_of(request.scope)
        asked = Question(
            request_id=request.scope["state"]["request_id"],
            tenant=caller.tenant,
            model=wire.model,
            messages=tuple(Message("user", (TextPart(text),)) for text in wire.input),
            arrival_s=time.monotonic(),
            key_id=caller.key_id,
            limits=caller.limits,
        )
        found = await self._service.embed(asked, wire.input_type or "passage", wire.dimensions)
        body = await asyncio.to_thread(_shown, found.vectors, wire.encoding_format == "base64")
        usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
        answer = json_response({"object": "list", "data": body, "model": found.model, "usage": usage})
        if ignored := ignored_fields(raw, WireEmbedding.model_fields, "embeddings"):
            answer.headers[IGNORED_HEADER.decode()] = ", ".join(ignored)
        return answer


def _refuse_tokens(given: object) -> None:
    if isinstance(given, list) and given and isinstance(given[0], int | list):
        raise Unsupported(
            "input holds token ids; this server's embedder takes text.",
            hint="Send strings (langchain: OpenAIEmbeddings(check_embedding_ctx_length=False)).",
            param="input",
        )
    if given in ("", []):
        raise InvalidRequest("input is empty.", hint="Send a text.", param="input")


def _shown(vectors: np.ndarray[Any, np.dtype[np.float32]], packed: bool) -> list[dict[str, Any]]:
    found = []
    for index, vector in enumerate(vectors):
        data = np.ascontiguousarray(vector, "<f4")
        value = base64.b64encode(data.tobytes()).decode() if packed else [float(each) for each in data]
        found.append({"object": "embedding", "index": index, "embedding": value})
    return found
