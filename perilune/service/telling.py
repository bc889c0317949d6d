"""What is kept of one answer in a session, however it ends: complete, stopped in the middle, or failed.

Listens to the answer's events; knows the session service and the `perilune` object, nothing of how answers are
made. Of an answer that was stopped the question and the text so far are kept, and marked; where no text had come,
nothing is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

from perilune.core import (
    ChoiceFinished,
    Citation,
    CitationAdded,
    Completed,
    Event,
    FinishReason,
    KeptAnswer,
    Plan,
    Planned,
    ReasoningDelta,
    Request,
    TextDelta,
    TurnCitation,
)
from perilune.service.report import citation_dict, degradation_dict, report_dict
from perilune.service.sessions import SessionService, Visit


class Telling:
    """A context around an answer's events, each of which `see` is told before anybody else. Without a visit it does
    nothing."""

    def __init__(
        self,
        sessions: SessionService,
        visit: Visit | None,
        request: Request,
        question: str,
        clock: Callable[[], float],
    ) -> None:
        self._sessions = sessions
        self._visit = visit
        self._request = request
        self._question = question
        self._clock = clock
        self._said: list[str] = []
        self._thought: list[str] = []
        self._reason = FinishReason.STOP
        self._plan: Plan | None = None
        self._citations: list[Citation | TurnCitation] = []
        self._kept = False

    def __enter__(self) -> Telling:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if error is None or self._kept or not "".join(self._said).strip():
            return
        stopped = isinstance(error, GeneratorExit | asyncio.CancelledError)
        self._reason = FinishReason.CANCELLED if stopped else FinishReason.ERROR
        self._keep(self._request.model, self._so_far(), None)

    def see(self, event: Event) -> None:
        match event:
            case TextDelta(choice=0, text=text):
                self._said.append(text)
            case ReasoningDelta(choice=0, text=text):
                self._thought.append(text)
            case ChoiceFinished(choice=0, reason=reason):
                self._reason = reason
            case Planned(plan):
                self._plan = plan
            case CitationAdded(citation):
                self._citations.append(citation)
            case Completed(usage, report):
                used = {name: getattr(usage, name) for name in usage.__slots__}
                self._keep(report.model, report_dict(report), used)
            case _:
                pass

    def _keep(self, model: str, perilune: dict[str, Any], usage: dict[str, int] | None) -> None:
        self._kept = True
        if self._visit is None:
            return
        request = self._request
        details = {
            "finish_reason": self._reason.value,
            "total_s": round(self._clock() - request.arrival_s, 4),
            "files": list(request.file_ids),
            "usage": usage,
            "perilune": perilune,
        }
        if thought := "".join(self._thought):
            details["reasoning"] = thought
        answer = KeptAnswer(request.request_id, model, details)
        self._sessions.remember(self._visit, self._question, "".join(self._said), request.profile, answer)

    def _so_far(self) -> dict[str, Any]:
        """What is known of an answer that did not come to its end."""
        known: dict[str, Any] = {"citations": [citation_dict(each) for each in self._citations]}
        if (plan := self._plan) is not None:
            known |= {"plan": plan.kind.value, "deadline_s": plan.deadline_s}
            known["predicted_ttft_s"] = round(plan.predicted_ttft_s, 4)
            known["degradations"] = [degradation_dict(each) for each in plan.degradations]
        return known
