"""POST /v1/messages/count_tokens: how long a message's prompt would be (Anthropic's dialect).

The answers themselves are `chat.ChatCompletions` in the dialect `ANTHROPIC`.
"""

from __future__ import annotations

import time

from starlette.types import Receive, Scope, Send

from perilune.api.auth import caller_of
from perilune.api.dialect import Dialect
from perilune.api.limits import read_body
from perilune.api.messages_answer import StreamedMessage, WholeMessage, error_event
from perilune.api.messages_request import parse_count, parse_messages
from perilune.api.wire import send_json
from perilune.config import Settings
from perilune.service.ports import ServiceApi

ANTHROPIC = Dialect(parse_messages, WholeMessage, StreamedMessage, error_event)


class CountTokens:
    def __init__(self, service: ServiceApi, settings: Settings) -> None:
        self._service = service
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = parse_count(
            await read_body(scope, receive, self._settings.server.max_body),
            request_id=scope["state"]["request_id"],
            caller=caller_of(scope),
            arrival_s=time.monotonic(),
            settings=self._settings,
        )
        await send_json(send, 200, {"input_tokens": await self._service.count_tokens(request)})
