"""Anthropic's Messages as a dialect of `chat.ChatCompletions`."""

from __future__ import annotations

from perilune.api.dialect import Dialect
from perilune.api.messages_answer import PING, StreamedMessage, WholeMessage, error_event, rate_headers
from perilune.api.messages_request import parse_messages

ANTHROPIC = Dialect(parse_messages, WholeMessage, StreamedMessage, error_event, PING, rate_headers)
