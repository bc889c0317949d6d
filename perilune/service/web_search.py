"""What the web says to a question, as one more document of the request (spec M11). Off unless configured and asked.

Knows results and documents; not how a search is asked. A document is read, cited, kept and deleted like every
other: a citation opens at its page, `documents.keep_days` ages it, and what a result says has no more rights than
what an upload says. A search that fails costs the answer nothing but its results, and is disclosed.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from perilune.core import Degradation, FilePart, Request
from perilune.errors import InvalidRequest, KeptHere
from perilune.service.backends.protocol import BackendFault
from perilune.service.backends.searxng import SearXNG, WebResult
from perilune.service.documents import DocumentService
from perilune.service.sessions import SessionService

PURPOSE = "web_search"
TITLE_CHARS = 60


class WebSearch:
    """Adds results to requests. `engine` is None where no server is configured."""

    def __init__(self, engine: SearXNG | None, documents: DocumentService, sessions: SessionService) -> None:
        self._engine = engine
        self._documents = documents
        self._sessions = sessions

    def require(self, request: Request) -> None:
        """Raises `InvalidRequest` for a request that wants the web where there is no way to it."""
        if request.web_results and self._engine is None:
            raise InvalidRequest(
                "This server searches no web.",
                hint="Leave out web_search_options, or have the operator set web_search.url.",
                param="web_search_options",
            )

    async def with_results(self, request: Request) -> Request:
        """The request with a document of results, or with the reason why there is none."""
        assert self._engine is not None  # `require` came first
        question = next(message.text for message in reversed(request.messages) if message.role == "user")
        try:
            await self._sessions.require_may_leave(request)
            found = await self._engine.search(request.tenant, request.request_id, question, request.web_results)
        except KeptHere as error:
            return _told(request, error.message)
        except BackendFault as fault:
            return _told(request, f"The web search {fault.detail}")
        if not found:
            return _told(request, "The web search found nothing.")
        name, text = (
            f"Web search: {' '.join(question.split())[:TITLE_CHARS]}.md",
            document(found, datetime.now(UTC)),
        )
        record = await self._documents.upload(request.tenant, name, PURPOSE, io.BytesIO(text.encode()))
        return _with_file(request, record.file_id)


def document(results: Sequence[WebResult], when: datetime) -> str:
    """Results as Markdown, each under a heading of its own."""
    parts = [f"Found on the web on {when:%Y-%m-%d at %H:%M} UTC."]
    parts += [f"## {result.title}\n\n{result.extract}\n\nSource: {result.url}" for result in results]
    return "\n\n".join(parts) + "\n"


def _with_file(request: Request, file_id: str) -> Request:
    """The document stands in the newest question, as an attachment would."""
    at = max(index for index, message in enumerate(request.messages) if message.role == "user")
    asked = request.messages[at]
    messages = list(request.messages)
    messages[at] = replace(asked, parts=(FilePart(file_id), *asked.parts))
    return replace(request, messages=tuple(messages))


def _told(request: Request, why: str) -> Request:
    return replace(request, notes=(*request.notes, Degradation("no_web_results", why)))
