"""What the answer to every request uses: the service's parts, its limits, what both kinds of answers keep to.

Plain data, wired by `build`; knows neither requests' lives nor routes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from perilune.core import KVPolicy, Request, ServiceClass
from perilune.service import presets
from perilune.service.abstain import Abstain
from perilune.service.backends.local import LocalBackend
from perilune.service.compose import Composer
from perilune.service.documents import DocumentService
from perilune.service.model import ServedModel
from perilune.service.peak import Peak
from perilune.service.ports import Grammars, Library, Tokenizer
from perilune.service.predictor import Predictor
from perilune.service.sessions import SessionService
from perilune.service.thinking import ThinkingStyle
from perilune.service.tools.formats import ToolFormat
from perilune.service.web_search import WebSearch
from perilune.telemetry import Telemetry

ANSWER_RESERVE_TOKENS = 256
"""Window kept for the answer when a context is judged to fit (less if `max_tokens` is less). A larger `max_tokens`
is clipped to what the prompt leaves."""

WHOLE_CITATIONS = 3
"""Passages quoted beside an answer that read the whole document."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines and timeouts of the configuration, in seconds."""

    interactive_s: float
    document_s: float
    reserve_s: float
    timeout_s: float

    def deadline_s(self, request: Request) -> float:
        if request.deadline_s is not None:
            return request.deadline_s
        if request.service_class is ServiceClass.P0_INTERACTIVE:
            return self.interactive_s
        return self.document_s if request.service_class is ServiceClass.P1_DOCUMENT else self.timeout_s


@dataclass(frozen=True, slots=True)
class Parts:
    """What every request uses."""

    model: ServedModel
    tokenizer: Tokenizer
    composer: Composer
    grammars: Grammars
    tool_format: ToolFormat
    library: Library
    documents: DocumentService
    sessions: SessionService
    backend: LocalBackend
    predictor: Predictor
    salt_of: Callable[[str], bytes]
    detect_language: Callable[[str], str | None]
    limits: Limits
    web: WebSearch
    peak: Peak
    clock: Callable[[], float]
    telemetry: Telemetry
    kv_of: Callable[[str], KVPolicy] = presets.all_full
    preset: str = presets.AUTO
    abstain: Abstain = Abstain.OFF
    thinking: ThinkingStyle | None = None
