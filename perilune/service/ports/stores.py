"""What the service needs of memory. Types only.

`Library` is `memory.library.Library`, `SessionStore` is `memory.sessions.Sessions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Protocol

from perilune.core import (
    ANY_TIME,
    Feedback,
    FileRecord,
    KeptAnswer,
    Page,
    PageView,
    Passage,
    ProfileFact,
    SearchResult,
    SessionInfo,
    SessionTurn,
    Span,
    SummarySentence,
    Times,
)


class Library(Protocol):
    """Files, their text and their index. Synchronous and thread-safe; the service calls it off the event loop."""

    def add_file(
        self,
        tenant: str,
        filename: str,
        purpose: str,
        data: BinaryIO,
        max_bytes: int,
        local_only: bool = False,
        *,
        lasts_s: float | None = None,
        file_id: str | None = None,
    ) -> FileRecord:
        """Store a file; a `local_only` one's text never leaves this machine, and after `lasts_s` it is gone.
        Raises `TooLarge` past `max_bytes` and `UnsupportedDocument` for an empty one."""
        ...

    def due_files(self) -> list[FileRecord]:
        """Files of every tenant that have expired."""
        ...

    def get_file(self, tenant: str, file_id: str) -> FileRecord:
        """Raises `NotFound`, for another tenant's file too."""
        ...

    def list_files(self, tenant: str) -> list[FileRecord]: ...

    def all_files(self) -> list[FileRecord]:
        """Files of every tenant, newest first."""
        ...

    def unfinished_files(self) -> list[FileRecord]:
        """Files of every tenant whose ingest has not ended (resume after a restart)."""
        ...

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Remove bytes, text, passages and index rows. Raises `NotFound`."""
        ...

    def open_file(self, tenant: str, file_id: str) -> BinaryIO:
        """The uploaded bytes, for the caller to close."""
        ...

    def pages(self, tenant: str, file_id: str) -> list[Page]:
        """What is parsed so far, in order."""
        ...

    def page(self, tenant: str, file_id: str, number: int) -> PageView:
        """Raises `NotFound`, also for a page that is not read yet."""
        ...

    def page_image(self, tenant: str, file_id: str, number: int, width: int) -> bytes:
        """A page as a PNG. Raises `NotFound` where there is none, `UnsupportedDocument` where it can't be drawn."""
        ...

    def text(self, tenant: str, file_id: str) -> str:
        """What is parsed so far, as one text; page offsets point into it."""
        ...

    def text_chars(self, tenant: str, file_id: str) -> int:
        """Length of `text`, without reading it."""
        ...

    def parse(self, tenant: str, file_id: str, stopped: Callable[[], bool] = ...) -> Iterator[FileRecord]:
        """Parse and index in a limited subprocess, yielding the record as pages arrive. Resumes where it stopped.

        Ends with status PREFILLING (text complete) or ERROR (the record says what, why, what to do). Closing the
        iterator stops the parser; so does `stopped`, asked several times a second, and leaves the file unfinished.
        """
        ...

    def set_status(self, record: FileRecord) -> None:
        """Store a record's `status`, `tokens` and `error`."""
        ...

    def search(self, tenant: str, file_ids: Sequence[str], query: str, limit: int) -> list[Passage]:
        """The hits of `find`."""
        ...

    def find(self, tenant: str, file_ids: Sequence[str], query: str, limit: int) -> SearchResult:
        """Best passages first, over what is indexed so far."""
        ...

    def search_faults(self) -> list[str]:
        """Why searches find less than they could, in sentences for people; empty where nothing is amiss."""
        ...


class SessionStore(Protocol):
    """Kept conversations. Synchronous and thread-safe; the service calls it off the event loop."""

    def add(
        self,
        tenant: str,
        session_id: str,
        said: Sequence[tuple[str, str, float]],
        learn: bool = False,
        local_only: bool = False,
        answer: KeptAnswer | None = None,
    ) -> int:
        """Append what was said, as (speaker, text, seconds since the epoch); returns the first turn's number.
        `learn` facts about the user from what they say; `local_only` keeps the session on this machine; `answer`
        says how the answer came about, and by which id it is found."""
        ...

    def answers(self, tenant: str, session_id: str, first: int, last: int) -> dict[int, tuple[str, dict[str, Any]]]:
        """(id, how it came about) of the answers to the questions from turn `first` to `last`, by their turns."""
        ...

    def sessions(self, tenant: str, limit: int, cursor: str | None = None) -> list[SessionInfo]:
        """Those with the newest turns first, behind a `cursor`. Raises `InvalidRequest` for a bad one."""
        ...

    def set_title(self, tenant: str, session_id: str, title: str | None) -> None:
        """Call a session so; None: by its first question again. Raises `NotFound`, `InvalidRequest`."""
        ...

    def fork(self, tenant: str, session_id: str, turn: int, new_id: str | None) -> str:
        """A new session with the turns up to number `turn`; returns its id. Raises `NotFound`, `Conflict`,
        `InvalidRequest`."""
        ...

    def get(self, tenant: str, session_id: str) -> SessionInfo:
        """Raises `NotFound`, for another tenant's session too."""
        ...

    def turns(self, tenant: str, session_id: str, after: int, limit: int) -> list[SessionTurn]:
        """Turns behind number `after`, in order. Raises `NotFound`."""
        ...

    def search(
        self, tenant: str, session_ids: Sequence[str] | None, query: str, limit: int, times: Times = ANY_TIME
    ) -> SearchResult:
        """The best turns of these sessions; None: of all sessions, and passages of all files."""
        ...

    def mark(self, tenant: str, question: str, span: Span) -> str:
        """Remember where a question's answer is; returns the mark's id. Raises `NotFound`."""
        ...

    def marks(self, tenant: str, limit: int) -> list[Feedback]:
        """The newest marks first."""
        ...

    def unmark(self, tenant: str, feedback_id: str) -> None:
        """Raises `NotFound`."""
        ...

    def kept_here(self, tenant: str, source_ids: Sequence[str]) -> frozenset[str]:
        """Those of the sessions and files whose text must not leave this machine."""
        ...

    def keep_here(self, tenant: str, session_id: str, local_only: bool) -> None:
        """Keep a session's text on this machine, or let it go again. Raises `NotFound`."""
        ...

    def expired(self, before_s: float) -> list[tuple[str, str]]:
        """(tenant, session) of every session whose last turn was said before that time."""
        ...

    def forget_tenant(self, tenant: str) -> list[str]:
        """Remove all that is kept of a tenant but its keys and the audit; returns its sessions' ids."""
        ...

    def delete(self, tenant: str, session_id: str) -> None:
        """Remove everything kept of a session. Raises `NotFound`."""
        ...

    def profile(self, tenant: str, history: bool) -> list[ProfileFact]:
        """What is known about the user, in the order in which it was learnt; `history` adds what was true
        before."""
        ...

    def edit_profile(self, tenant: str, values: Mapping[str, str | None]) -> None:
        """Set keys by hand; None erases one. Raises `InvalidRequest`."""
        ...

    def erase_profile(self, tenant: str, key: str | None) -> int:
        """Delete a key with its history, or everything; returns how many statements. Raises `NotFound`."""
        ...

    def summary(self, tenant: str, source_id: str) -> list[SummarySentence]:
        """The whole summary of a session or file, in order. Raises `NotFound`."""
        ...

    def brief(self, tenant: str, session_id: str) -> list[SummarySentence]:
        """A session's summary for a prompt: the best first. Empty where there is none."""
        ...

    def correct_summary(self, tenant: str, source_id: str, number: int, start: int, text: str | None) -> None:
        """Replace a sentence; "" strikes it out, None takes that back. Raises `NotFound`, `InvalidRequest`."""
        ...

    def export(self, tenant: str) -> Iterator[dict[str, Any]]:
        """Everything kept about the user, as JSON values."""
        ...
