"""Events of one answer -> text for people: the answer on stdout, the rest on stderr.

Knows how things look; doesn't know where the events come from.
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass, field

from perilune.cli.console import StatusLine, say
from perilune.cli.documents import Documents
from perilune.cli.timing import Milestones
from perilune.core import (
    ChoiceFinished,
    CitationAdded,
    Completed,
    Event,
    FinishReason,
    Plan,
    Planned,
    PrefillProgress,
    Report,
    StageStarted,
    TextDelta,
)

QUOTE_CHARS = 240


@dataclass(slots=True)
class Answer:
    """Collects one answer and shows it as it comes; `quiet` only collects."""

    status: StatusLine
    milestones: Milestones
    quiet: bool = False
    text: list[str] = field(default_factory=list)
    end: Completed | None = None
    reason: FinishReason | None = None
    _told: set[str] = field(default_factory=set)

    def add(self, event: Event) -> None:
        match event:
            case StageStarted(stage):
                self.status.update(stage)
            case Planned(plan):
                self._plan(plan)
            case PrefillProgress(done, total, cached, eta_s):
                found = f", {cached:,} cached" if cached else ""
                self.status.update("prefilling", f"{done:,} of {total:,} tokens{found}, {eta_s:.1f} s to go")
            case CitationAdded(_):
                pass  # printed with the report, behind the answer
            case TextDelta(_, text):
                self._text(text)
            case ChoiceFinished(_, reason):
                self.reason = reason
            case Completed():
                self.end = event

    def finish(self, documents: Documents) -> None:
        """Close the answer's last line; print passages, what is missing, and timings."""
        self.milestones.mark("answered_s")
        self.status.clear()
        if self.quiet:
            return
        if self.text and not self.text[-1].endswith("\n"):
            print(flush=True)
        if self.end is None:
            return
        if self.reason is FinishReason.LENGTH:
            say("note: the answer was cut at its largest length; --max-tokens allows more.")
        say()
        self._citations(self.end.report, documents)
        self._degradations(self.end.report)
        self._timings(self.end)

    def _plan(self, plan: Plan) -> None:
        if self.quiet:
            return
        self.status.clear()
        late = "" if plan.predicted_ttft_s <= plan.deadline_s else ", later than asked for"
        say(
            f"plan: {plan.kind.value}, answer expected to start in {plan.predicted_ttft_s:.1f} s "
            f"(deadline {plan.deadline_s:g} s{late})"
        )

    def _text(self, text: str) -> None:
        if not text:
            return
        self.milestones.mark("first_token_s")
        if not self.quiet:
            self.status.clear()
            sys.stdout.write(text)
            sys.stdout.flush()
        self.text.append(text)

    def _citations(self, report: Report, documents: Documents) -> None:
        if report.citations:
            say("passages used:")
        for citation in report.citations:
            quote = " ".join(citation.quote.split())
            shown = textwrap.shorten(quote, QUOTE_CHARS, placeholder=" …") if " " in quote else quote[:QUOTE_CHARS]
            say(f'  [{documents.place(citation)}] "{shown}"')

    def _degradations(self, report: Report) -> None:
        for item in report.degradations:
            if item.code not in self._told:
                self._told.add(item.code)
                say(f"note: {item.reason}")

    def _timings(self, end: Completed) -> None:
        report, at = end.report, self.milestones.at_s
        tokens = report.tokens
        cached = tokens.cached.ram + tokens.cached.disk
        say(
            f"context: {tokens.offered:,} tokens offered, {tokens.exact:,} read exactly, "
            f"{tokens.dropped:,} left out, {cached:,} found in cache"
        )
        measured = "-" if report.measured_ttft_s is None else f"{report.measured_ttft_s:.2f} s"
        started = at.get("first_token_s")
        since = f", {started:.2f} s after the program" if started is not None else ""
        say(
            f"time: answer started {measured} after the question{since} "
            f"(predicted {report.predicted_ttft_s:.2f} s); {end.usage.completion_tokens} tokens by {report.model}"
        )
