"""`perilune ask FILE... "question"`: ingest, ask, show. Answers on stdout, the rest on stderr."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from perilune.cli.client import Client, Question, connect
from perilune.cli.console import StatusLine, print_json, say
from perilune.cli.documents import (
    Documents,
    Source,
    discard,
    read_sources,
    upload,
    wait_for_text,
    wait_until_finished,
)
from perilune.cli.render import Answer
from perilune.cli.timing import Milestones
from perilune.config import Settings
from perilune.core import Completed, ContextPolicy, FilePart, Message, TextPart
from perilune.errors import InternalError, InvalidRequest


@dataclass(frozen=True, slots=True)
class Options:
    deadline_s: float | None = None
    policy: ContextPolicy = ContextPolicy.AUTO
    max_tokens: int | None = None
    wait: bool = False
    as_json: bool = False
    report: Path | None = None


def policy_of(name: str) -> ContextPolicy:
    """Raises `InvalidRequest` naming the choices."""
    try:
        return ContextPolicy(name)
    except ValueError:
        choices = ", ".join(policy.value for policy in ContextPolicy)
        raise InvalidRequest(f"There is no policy {name!r}.", hint=f"Use one of {choices}.") from None


def run(settings: Settings, paths: Sequence[Path], question: str, options: Options, model_given: bool) -> None:
    """Answer one question and return."""
    milestones = Milestones()
    milestones.mark("main_s")
    if not question.strip():
        raise InvalidRequest("The question is empty.", hint="The question is the last word; quote it.")
    sources = read_sources(paths)
    try:
        asyncio.run(_run(settings, sources, question, options, model_given, milestones))
    finally:
        discard(sources)


async def _run(
    settings: Settings,
    sources: Sequence[Source],
    question: str,
    options: Options,
    model_given: bool,
    milestones: Milestones,
) -> None:
    status = StatusLine(quiet=options.as_json)
    status.update("loading", settings.model.path)
    client = await connect(settings, model_given)
    try:
        milestones.mark("ready_s")
        documents = await upload(client, sources, status)
        limit_s = options.deadline_s or settings.deadlines.interactive_s
        await wait_for_text(client, documents, limit_s, status)
        if options.wait:
            await wait_until_finished(client, documents, status)
        milestones.mark("documents_s")
        answer = await _ask(client, documents, question, options, status, milestones)
        answer.finish(documents)
        if client.in_process and not documents.finished:
            await _finish_ingest(client, documents, status, options.as_json)
        milestones.mark("done_s")
        result = _result(answer, documents, milestones, client)
        if options.report is not None:
            options.report.write_text(json.dumps(result, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        if options.as_json:
            print_json(result)
    finally:
        status.clear()
        await client.close()


async def _ask(
    client: Client,
    documents: Documents,
    question: str,
    options: Options,
    status: StatusLine,
    milestones: Milestones,
) -> Answer:
    parts: tuple[FilePart | TextPart, ...] = (
        *(FilePart(file_id) for file_id in documents.file_ids),
        TextPart(question),
    )
    asked = Question((Message("user", parts),), options.policy, options.deadline_s, options.max_tokens)
    answer = Answer(status, milestones, quiet=options.as_json)
    milestones.mark("asked_s")
    async with aclosing(cast("Any", client.ask(asked))) as events:
        async for event in events:
            answer.add(event)
    return answer


async def _finish_ingest(client: Client, documents: Documents, status: StatusLine, quiet: bool) -> None:
    """The service ends with this process: let it make the next question warm."""
    if not quiet:
        say("preparing the document for the next question (Ctrl-C stops; it continues next time)")
    await wait_until_finished(client, documents, status)


def _result(answer: Answer, documents: Documents, milestones: Milestones, client: Client) -> dict[str, object]:
    from perilune.service.report import report_dict

    end = answer.end
    if not isinstance(end, Completed):
        raise InternalError("The answer ended before it was complete.", hint="Run the command again.")
    files = [
        {
            "id": record.file_id,
            "filename": record.filename,
            "status": record.status.value,
            "pages": record.pages_total,
            "tokens": record.tokens,
        }
        for record in documents.records.values()
    ]
    return {
        "answer": "".join(answer.text),
        "finish_reason": answer.reason.value if answer.reason else None,
        "usage": {
            "prompt_tokens": end.usage.prompt_tokens,
            "completion_tokens": end.usage.completion_tokens,
            "cached_tokens": end.usage.cached_tokens,
        },
        "perilune": report_dict(end.report),
        "files": files,
        "server": None if client.in_process else client.model,
        "elapsed": dict(milestones.at_s),
    }
