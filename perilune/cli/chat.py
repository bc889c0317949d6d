"""`perilune chat`: a conversation in the terminal, with documents or without.

Reading a line happens in the main thread; the service lives on an event loop in another, so that ingest goes on
while somebody types. Ctrl-C stops an answer, or leaves at the prompt. The conversation is kept in memory only,
unless it is one of a session.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import textwrap
import threading
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from perilune.cli.client import Client, KeptTurn, Question, connect
from perilune.cli.console import StatusLine, say, show_error
from perilune.cli.documents import STDIN, Documents, check_paths, discard, read_sources, upload, wait_for_text
from perilune.cli.render import Answer
from perilune.cli.timing import Milestones
from perilune.config import Settings
from perilune.core import FilePart, Message, TextPart
from perilune.errors import InvalidRequest, PeriluneError
from perilune.memory.session_ids import SESSION_ID_FORM, is_session_id

T = TypeVar("T")

HELP = """/add FILE   add a document
/files      list documents
/new        begin another conversation, keep the documents
/quit       leave (also Ctrl-D)"""


RESUMED_TURNS = 200
"""Of a session that goes on; the server finds what was said before these by itself."""


@dataclass(frozen=True, slots=True)
class Options:
    max_tokens: int | None = None
    session_id: str | None = None


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chat loop", daemon=True)

    def __enter__(self) -> LoopThread:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end; Ctrl-C cancels the work, waits until it has stopped, and is raised again."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            concurrent.futures.wait([future])
            raise


@dataclass(slots=True)
class Conversation:
    """What was said. A document stands in front of the first message after it was added, so prefixes stay."""

    client: Client
    options: Options
    wait_s: float
    documents: Documents = field(default_factory=Documents)
    messages: list[Message] = field(default_factory=list)
    _unsent: list[str] = field(default_factory=list)

    async def add(self, paths: Sequence[Path]) -> None:
        status = StatusLine()
        sources = read_sources(paths)
        try:
            fresh = await upload(self.client, sources, status)
        finally:
            discard(sources)
        await wait_for_text(self.client, fresh, self.wait_s, status)
        self.documents.sources |= fresh.sources
        self.documents.records |= fresh.records
        self._unsent += [file_id for file_id in fresh.file_ids if file_id not in self._unsent]

    async def resume(self, session_id: str) -> None:
        """Go on where the session ended. Documents that are gone are left out."""
        turns = await self.client.turns(session_id, RESUMED_TURNS)
        there = {record.file_id for record in await self.client.files()}
        for turn in turns:
            files = tuple(FilePart(each) for each in turn.file_ids if each in there)
            role = "assistant" if turn.speaker == "assistant" else "user"
            self.messages.append(Message(role, (*files, TextPart(turn.text))))
        if turns:
            say(f"{session_id} goes on; its last words were:\n{_last_words(turns)}")

    def restart(self) -> None:
        """Forget what was said; a session is left as it is."""
        self.options = replace(self.options, session_id=None)
        self.messages.clear()
        self._unsent = list(self.documents.file_ids)

    async def say(self, text: str) -> None:
        """Ask, show, remember. A turn that failed or was stopped is not remembered."""
        message = Message("user", (*(FilePart(file_id) for file_id in self._unsent), TextPart(text)))
        question = Question(
            (*self.messages, message), max_tokens=self.options.max_tokens, session_id=self.options.session_id
        )
        answer = Answer(StatusLine(), Milestones())
        async with aclosing(cast("Any", self.client.ask(question))) as events:
            async for event in events:
                answer.add(event)
        answer.finish(self.documents)
        self.messages += [message, Message("assistant", (TextPart("".join(answer.text)),))]
        self._unsent = []


def run(settings: Settings, files: Sequence[Path], options: Options, model_given: bool) -> None:
    """Talk until the input ends. Raises `InvalidRequest` for a name that no session can have."""
    if STDIN in files:
        raise InvalidRequest("stdin is what you say in a chat; it can't be a document, too.", hint="Name a file.")
    check_paths(files)  # a wrong name is told before anything is loaded
    session_id = options.session_id
    if session_id is not None and not is_session_id(session_id):
        raise InvalidRequest(f"{session_id!r} can't name a session.", hint=f"A session id {SESSION_ID_FORM}.")
    with LoopThread() as loop:
        client = loop.run(connect(settings, model_given, keeps=session_id is not None))
        talk = Conversation(client, options, settings.deadlines.interactive_s)
        try:
            if session_id is not None:
                loop.run(talk.resume(session_id))
            if files:
                loop.run(talk.add(files))
            if sys.stdin.isatty():
                import readline  # noqa: F401 - gives input() its line editing

                say(f"{client.model}. /help shows what can be typed.")
            _talk(loop, talk)
        finally:
            loop.run(client.close())


def _last_words(turns: Sequence[KeptTurn]) -> str:
    """The last question and answer, cut to what reminds of them."""
    return "\n".join(textwrap.shorten(f"{each.speaker}: {each.text}", 200, placeholder=" …") for each in turns[-2:])


def _talk(loop: LoopThread, talk: Conversation) -> None:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line in ("/quit", "/exit"):
            return
        try:
            if line.startswith("/"):
                _command(loop, talk, line)
            elif line:
                loop.run(talk.say(line))
        except PeriluneError as error:
            show_error(error)
            if not sys.stdin.isatty():
                raise
        except KeyboardInterrupt:
            say("\nstopped")


def _command(loop: LoopThread, talk: Conversation, line: str) -> None:
    word, _, rest = line.partition(" ")
    match word:
        case "/add" if rest.strip():
            loop.run(talk.add([Path(rest.strip()).expanduser()]))
        case "/files":
            for record in talk.documents.records.values():
                say(f"{record.filename}: {record.status.value}, {record.pages_parsed} pages")
        case "/new":
            talk.restart()
        case _:
            say(HELP)
