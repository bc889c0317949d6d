"""The `perilune` object: a report as plain JSON values (docs/perilune-object.schema.json).

Knows the object's keys and nothing of any dialect. Durations are rounded to 0.1 ms.
"""

from __future__ import annotations

from typing import Any

from perilune.core import Attempt, CacheHit, Citation, Claim, Degradation, MemoryUse, Plan, Report, TurnCitation


def report_dict(report: Report) -> dict[str, Any]:
    """The object that every finished answer carries."""
    tokens = report.tokens
    measured = report.measured_ttft_s
    return {
        "plan": report.plan.value,
        "deadline_s": report.deadline_s,
        "predicted_ttft_s": round(report.predicted_ttft_s, 4),
        "measured_ttft_s": None if measured is None else round(measured, 4),
        "tokens": {
            "offered": tokens.offered,
            "exact": tokens.exact,
            "estimated": tokens.estimated,
            "summarised": tokens.summarised,
            "dropped": tokens.dropped,
            "cached": {"ram": tokens.cached.ram, "disk": tokens.cached.disk},
        },
        "model": report.model,
        "backend": report.backend,
        "citations": [citation_dict(citation) for citation in report.citations],
        "degradations": [degradation_dict(item) for item in report.degradations],
        "attempts": [attempt_dict(attempt) for attempt in report.attempts],
        "cost": report.cost,
        "memory": memory_dict(report.memory),
        "confidence": None if report.confidence is None else round(report.confidence, 4),
        "taken_out": dict(report.taken_out),
        "answer_cache": None if report.answer_cache is None else cache_hit_dict(report.answer_cache),
        "claims": None if report.claims is None else [claim_dict(claim) for claim in report.claims],
    }


def claim_dict(claim: Claim) -> dict[str, Any]:
    return {
        "start": claim.start,
        "end": claim.end,
        "verdict": claim.verdict,
        "citation": None if claim.citation is None else citation_dict(claim.citation),
    }


def memory_dict(use: MemoryUse) -> dict[str, Any]:
    """What memory said of the user and of the session, with where it was said."""
    return {
        "profile": [
            {"key": fact.key, "value": fact.value, "session": fact.session_id, "turn": fact.turn}
            for fact in use.facts
        ],
        "summary": [
            {
                "session": sentence.source_id,
                "turn": sentence.number,
                "start": sentence.start,
                "end": sentence.end,
                "quote": sentence.text,
                "corrected": sentence.corrected,
            }
            for sentence in use.sentences
        ],
    }


def plan_dict(plan: Plan) -> dict[str, Any]:
    """The plan as a stage event shows it, before the answer."""
    return {
        "plan": plan.kind.value,
        "deadline_s": plan.deadline_s,
        "predicted_ttft_s": round(plan.predicted_ttft_s, 4),
        "fidelity": round(plan.fidelity, 4),
        "context_tokens": plan.context_tokens,
        "uncached_tokens": plan.uncached_tokens,
        "degradations": [degradation_dict(item) for item in plan.degradations],
    }


def citation_dict(citation: Citation | TurnCitation) -> dict[str, Any]:
    """A passage of a file, or a turn of a session."""
    if isinstance(citation, TurnCitation):
        return {
            "session": citation.session_id,
            "turn": citation.turn,
            "speaker": citation.speaker,
            "at": citation.at,
            "quote": citation.quote,
        }
    return {
        "file_id": citation.file_id,
        "filename": citation.filename,
        "page": citation.page,
        "anchor": citation.anchor,
        "start": citation.start,
        "end": citation.end,
        "quote": citation.quote,
    }


def attempt_dict(attempt: Attempt) -> dict[str, Any]:
    return {
        "backend": attempt.backend,
        "model": attempt.model,
        "outcome": attempt.outcome,
        "seconds": round(attempt.seconds, 4),
    }


def cache_hit_dict(hit: CacheHit) -> dict[str, Any]:
    return {"kind": hit.kind, "age_s": round(hit.age_s, 1), "question": hit.question}


def degradation_dict(degradation: Degradation) -> dict[str, str]:
    return {"code": degradation.code, "reason": degradation.reason}
