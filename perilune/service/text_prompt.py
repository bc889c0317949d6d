"""A request as plain messages for a backend whose tokenizer isn't here: documents and earlier turns are text there.

The same layout as compose.py: documents first, then what memory found, then instructions, then the conversation, so
that equal beginnings stay equal. Knows text and estimates of tokens; doesn't know backends or plans.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from perilune.core import Citation, Degradation, FileRecord, Message, Passage, Request, SessionTurn
from perilune.errors import InvalidRequest
from perilune.service.backends.health import estimated_tokens
from perilune.service.backends.protocol import ChatMessage
from perilune.service.compose import DOCUMENT_INSTRUCTIONS, PASSAGE_INSTRUCTIONS
from perilune.service.passages import choose_passages, citation, joined
from perilune.service.ports import Library
from perilune.service.recall import HEADING, choose_turns
from perilune.service.refine import CANDIDATES, HISTORY_SHARE, OPENING_PAGES

RECALL_TOKENS = 1024
_MESSAGE_TOKENS = 6.0  # what a chat template puts around a message, about


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Messages with what is said about them. `estimate` and `exact` are estimated tokens: of all of it, and of what
    the caller offered in it."""

    messages: tuple[ChatMessage, ...]
    estimate: float
    exact: float
    citations: tuple[Citation, ...] = ()
    degradations: tuple[Degradation, ...] = ()


class TextComposer:
    """Prompts of one request. `texts` are the whole texts of `records`, None where they are too long to be whole.

    Raises `InvalidRequest` without a question.
    """

    def __init__(
        self, request: Request, records: Sequence[FileRecord], recalled: Sequence[SessionTurn] = ()
    ) -> None:
        self._records = list(records)
        self._names = {record.file_id: record.filename for record in records}
        self._recalled = _recalled_text(recalled, request)
        self._instructions, self._turns = _split(request.messages)
        self._request = request
        self._told = _told(request)

    @property
    def question(self) -> str:
        return next(turn.text for turn in reversed(self._turns) if turn.role == "user")

    @property
    def has_history(self) -> bool:
        return len(self._turns) > 1

    def whole(self, texts: Sequence[str]) -> TextPrompt:
        """Everything that was offered; `texts` are the documents' in order."""
        pieces = [
            f"Document:\n{text}\n(End of the document {record.filename!r}.)\n\n"
            for record, text in zip(self._records, texts, strict=True)
        ]
        return self._prompt(pieces, DOCUMENT_INSTRUCTIONS, self._turns)

    def least(self) -> float:
        """Estimated tokens of instructions and question alone."""
        return self._prompt([], "", self._turns[self._last_question() :]).estimate

    def refined(self, library: Library, budget: float) -> TextPrompt:
        """Newest turns and best passages within `budget` estimated tokens. Blocks: it searches."""
        kept, dropped = self._newest(budget)
        said = []
        if dropped:
            said.append(
                Degradation("history_dropped", f"The oldest {dropped} messages of the conversation were left out.")
            )
        if not self._records:
            prompt = self._prompt([], "", kept)
            return TextPrompt(prompt.messages, prompt.estimate, prompt.exact, (), tuple(said))
        left = int(budget - self._prompt([], PASSAGE_INSTRUCTIONS, kept).estimate)
        passages, found = self._passages(library, left)
        if not found:
            said.append(
                Degradation(
                    "nothing_found",
                    "No passage matches the question's words; the answer is from the opening of the document.",
                )
            )
        prompt = self._prompt([self._piece(passage) for passage in passages], PASSAGE_INSTRUCTIONS, kept)
        quoted = tuple(citation(passage, self._names) for passage in passages)
        return TextPrompt(prompt.messages, prompt.estimate, prompt.exact, quoted, tuple(said))

    def quotes(self, library: Library, limit: int) -> tuple[Citation, ...]:
        """Where the answer is likely to be found, beside an answer that read everything. Blocks."""
        found = library.search(self._request.tenant, list(self._names), self.question, limit)
        return tuple(citation(passage, self._names) for passage in joined(found, list(self._names)))

    # ----------------------------------------------------------------------------------------- parts

    def _prompt(self, pieces: Sequence[str], instructions: str, turns: Sequence[ChatMessage]) -> TextPrompt:
        told = self._instructions or (instructions if pieces else "")
        system = "".join(pieces) + self._recalled + told
        messages = ((ChatMessage("system", system),) if system else ()) + tuple(turns)
        estimate = self._told + sum(_estimate(message) for message in messages)
        return TextPrompt(messages, estimate, estimate)

    def _last_question(self) -> int:
        return max(index for index, turn in enumerate(self._turns) if turn.role == "user")

    def _newest(self, budget: float) -> tuple[list[ChatMessage], int]:
        """Drop turns from the oldest, always leaving the last question; what is kept starts with a user turn."""
        turns, last = self._turns, self._last_question()
        free = budget - self._prompt([], PASSAGE_INSTRUCTIONS, turns[last:]).estimate
        allowed = free * HISTORY_SHARE if self._records else free
        first, spent = last, 0.0
        for index in range(last - 1, -1, -1):
            spent += _estimate(turns[index])
            if spent > allowed:
                break
            if turns[index].role == "user" or index == 0:
                first = index
        return turns[first:], first

    def _passages(self, library: Library, budget: int) -> tuple[list[Passage], bool]:
        """(chosen passages, whether the search found them)."""
        order, tenant = list(self._names), self._request.tenant

        def count(passage: Passage) -> int:
            return int(estimated_tokens(self._piece(passage))) + 1

        found = library.search(tenant, order, self.question, CANDIDATES)
        if found:
            return choose_passages(found, budget, count, order), True
        opening = [
            Passage(record.file_id, page.number, page.start, page.end, page.text, 0.0, page.anchor)
            for record in self._records
            for page in library.pages(tenant, record.file_id)[:OPENING_PAGES]
            if page.text.strip()
        ]
        return choose_passages(opening, budget, count, order), False

    def _piece(self, passage: Passage) -> str:
        place = passage.anchor or f"page {passage.page}"
        return f"[{self._names[passage.file_id]}, {place}]\n{passage.text.strip()}\n\n"


def _estimate(message: ChatMessage) -> float:
    calls = sum(estimated_tokens(call.name + call.arguments) for call in message.tool_calls)
    return estimated_tokens(message.text) + calls + _MESSAGE_TOKENS


def _told(request: Request) -> float:
    """Estimated tokens of the tools and of the form of the answer."""
    tools = sum(
        estimated_tokens(f"{tool.name} {tool.description} {tool.parameters}") for tool in request.tools.offered
    )
    grammar = request.sampling.grammar
    return tools + (0.0 if grammar is None else estimated_tokens(grammar.source))


def _split(messages: Sequence[Message]) -> tuple[str, list[ChatMessage]]:
    """The leading instructions, and the turns with text."""
    leading: list[str] = []
    turns: list[ChatMessage] = []
    for message in messages:
        text = message.text
        if message.role == "system" and not turns:
            leading.append(text)
        elif text or not message.file_ids:
            turns.append(ChatMessage(message.role, text, message.tool_calls, message.tool_call_id))
    if not any(turn.role == "user" and turn.text.strip() for turn in turns):
        raise InvalidRequest(
            "The request has no question: no user message with text.",
            hint="Add a message with role 'user' and some text.",
            param="messages",
        )
    return "\n\n".join(text for text in leading if text), turns


def chosen_turns(found: Sequence[SessionTurn], request: Request) -> list[SessionTurn]:
    """Which of the found turns enter the prompt."""
    known = {message.text.strip() for message in request.messages}
    return choose_turns(
        found, known, RECALL_TOKENS, lambda turn: int(estimated_tokens(turn.text)) + 16, request.recall
    )


def _recalled_text(turns: Sequence[SessionTurn], request: Request) -> str:
    if not turns:
        return ""
    several = request.recall != (request.session_id,)
    parts = [HEADING]
    for turn in turns:
        session = f"session {turn.session_id!r}, " if several else ""
        said_at = f", {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(turn.at))}" if turn.at is not None else ""
        parts.append(f"[{session}turn {turn.turn}, {turn.speaker}{said_at}]\n{turn.text.strip()}\n\n")
    return "".join(parts)
