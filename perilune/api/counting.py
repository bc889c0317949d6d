"""How long a prompt would be, without answering it, as each dialect asks and says it.

`/v1/messages/count_tokens` (Anthropic), `/v1/responses/input_tokens` (OpenAI),
`/v1/tokenizers/estimate-token-count` (Moonshot). Knows the shapes; the service composes and counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from perilune.api.auth import caller_of
from perilune.api.dialect import Parse
from perilune.api.limits import read_body
from perilune.api.messages_request import parse_count_call
from perilune.api.responses_request import parse_response
from perilune.api.schema import parse_chat
from perilune.api.wire import send_json
from perilune.config import Settings
from perilune.service.ports import ServiceApi


@dataclass(frozen=True, slots=True)
class Counting:
    """A dialect's question: how it is parsed, and how the number is said."""

    parse: Parse
    shape: Callable[[int], dict[str, Any]]


ANTHROPIC_COUNT = Counting(parse_count_call, lambda tokens: {"input_tokens": tokens})
RESPONSES_COUNT = Counting(
    parse_response, lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens}
)
MOONSHOT_COUNT = Counting(parse_chat, lambda tokens: {"data": {"total_tokens": tokens}})


class CountTokens:
    """The endpoint of one dialect."""

    def __init__(self, service: ServiceApi, settings: Settings, counting: Counting) -> None:
        self._service = service
        self._settings = settings
        self._counting = counting

    async def _parse(self, scope: Scope, body: bytes) -> Parse:
        """How this body is parsed; another endpoint may read first what it goes on from."""
        return self._counting.parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._settings.server.max_body)
        call = (await self._parse(scope, body))(
            body,
            request_id=scope["state"]["request_id"],
            caller=caller_of(scope),
            arrival_s=time.monotonic(),
            settings=self._settings,
        )
        tokens = await self._service.count_tokens(call.request)
        await send_json(send, 200, self._counting.shape(tokens))
