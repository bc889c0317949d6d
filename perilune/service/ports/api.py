"""What the service offers to the layers above. Types only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from perilune.core import (
    ANY_TIME,
    AttributeFilter,
    Balance,
    Event,
    Feedback,
    FileRecord,
    KeyLimits,
    PageView,
    Plan,
    ProfileFact,
    Request,
    SearchResult,
    SessionInfo,
    SessionTurn,
    Span,
    StoreHit,
    SummarySentence,
    Times,
)
from perilune.errors import PeriluneError
from perilune.memory.batches import Batch
from perilune.memory.conversations import ConversationInfo
from perilune.memory.embed.protocol import Embedded, Role
from perilune.memory.paging import Part
from perilune.memory.ratings import Chosen, NewRating, RatedAnswer, Rating
from perilune.memory.responses import KeptResponse, Made
from perilune.memory.uploads import UploadPart, UploadRecord
from perilune.memory.vector_stores import VectorStores
from perilune.service.ports.models import T


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A servable model, as `/v1/models` lists it."""

    model_id: str
    created_at: int
    max_context_tokens: int
    licence: str


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a tenant, a role ("admin", "user", "read-only"), the key's own deadline, its id and limits."""

    tenant: str
    role: str
    deadline_s: float | None = None
    key_id: str | None = None
    limits: KeyLimits | None = None


class Documents(Protocol):
    """Uploaded documents, from the caller's side."""

    async def upload(
        self,
        tenant: str,
        filename: str,
        purpose: str,
        data: BinaryIO,
        local_only: bool = False,
        *,
        lasts_s: float | None = None,
        file_id: str | None = None,
    ) -> FileRecord:
        """Store; a document is then parsed, indexed and prefilled in the background (ingest before ask). After
        `lasts_s` the file is gone."""
        ...

    async def get(self, tenant: str, file_id: str) -> FileRecord: ...
    async def list(self, tenant: str) -> list[FileRecord]: ...
    async def delete(self, tenant: str, file_id: str) -> None: ...
    async def content(self, tenant: str, file_id: str) -> BinaryIO:
        """The uploaded bytes, for the caller to read in a thread and close."""
        ...

    async def text(self, tenant: str, file_id: str) -> str: ...
    async def page(self, tenant: str, file_id: str, number: int) -> PageView: ...
    async def page_image(self, tenant: str, file_id: str, number: int, width: int) -> bytes:
        """A PNG, drawn with care: the page may be hostile."""
        ...


class Uploads(Protocol):
    """Files that arrive in parts. Another tenant's upload is `NotFound`; one that has ended is `Conflict`."""

    async def create(
        self, tenant: str, filename: str, purpose: str, size_bytes: int, file_lasts_s: float | None
    ) -> UploadRecord:
        """Raises `TooLarge`, and `InvalidRequest` where too many are pending."""
        ...

    async def add_part(self, tenant: str, upload_id: str, data: BinaryIO) -> UploadPart: ...
    async def complete(
        self, tenant: str, upload_id: str, part_ids: Sequence[str], md5: str | None
    ) -> tuple[UploadRecord, FileRecord]:
        """The parts in this order become the file. Raises `InvalidRequest` where they aren't what was announced."""
        ...

    async def cancel(self, tenant: str, upload_id: str) -> UploadRecord: ...


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """How an endpoint answered a line of a batch: the status and body that a client would have seen. `error` is
    what it raised."""

    status: int
    request_id: str
    body: dict[str, Any]
    error: PeriluneError | None = None


class LineAnswers(Protocol):
    """The endpoints that lines of batches are answered by."""

    @property
    def endpoints(self) -> frozenset[str]:
        """Their paths: /v1/chat/completions, …"""
        ...

    async def answer(self, endpoint: str, caller: Caller, body: bytes) -> LineAnswer:
        """Raises nothing but cancellation."""
        ...


class Batches(Protocol):
    """Batches, from the caller's side. Another tenant's batch is `NotFound`."""

    def serve(self, answers: LineAnswers) -> None:
        """Who answers lines. Until it was called, batches wait."""
        ...

    async def create(
        self,
        caller: Caller,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        metadata: Mapping[str, str] | None,
        output_lasts_s: float | None,
    ) -> Batch:
        """Raises `InvalidRequest`, and `NotFound` for the file."""
        ...

    async def get(self, tenant: str, batch_id: str) -> Batch: ...
    async def page(self, tenant: str, part: Part) -> tuple[list[Batch], bool]:
        """A part of the tenant's batches, and whether there are more."""
        ...

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Raises `Conflict` for a batch that has ended."""
        ...


class Conversations(Protocol):
    """Kept sessions, from the caller's side. Another tenant's session is `NotFound`."""

    async def sessions(self, tenant: str, limit: int, cursor: str | None = None) -> list[SessionInfo]: ...
    async def get(self, tenant: str, session_id: str) -> SessionInfo: ...
    async def set_title(self, tenant: str, session_id: str, title: str | None) -> None: ...
    async def fork(self, tenant: str, session_id: str, turn: int, new_id: str | None) -> SessionInfo: ...
    async def turns(self, tenant: str, session_id: str, after: int, limit: int) -> list[SessionTurn]: ...
    async def answers(
        self, tenant: str, session_id: str, first: int, last: int
    ) -> dict[int, tuple[str, dict[str, Any]]]: ...
    async def search(
        self, tenant: str, session_ids: Sequence[str] | None, query: str, limit: int, times: Times = ANY_TIME
    ) -> SearchResult: ...
    async def mark(self, tenant: str, question: str, span: Span) -> str: ...
    async def marks(self, tenant: str, limit: int) -> list[Feedback]: ...
    async def unmark(self, tenant: str, feedback_id: str) -> None: ...
    async def keep_here(self, tenant: str, session_id: str, local_only: bool) -> None: ...
    async def delete(self, tenant: str, session_id: str) -> None: ...
    async def profile(self, tenant: str, history: bool) -> list[ProfileFact]: ...
    async def edit_profile(self, tenant: str, values: Mapping[str, str | None]) -> None: ...
    async def erase_profile(self, tenant: str, key: str | None) -> int: ...
    async def summary(self, tenant: str, source_id: str) -> list[SummarySentence]: ...
    async def correct_summary(
        self, tenant: str, source_id: str, number: int, start: int, text: str | None
    ) -> None: ...
    async def export(self, tenant: str) -> Iterator[dict[str, Any]]:
        """Records, to be read in a thread. See `SessionStore.export`."""
        ...


class KeptConversations(Protocol):
    """Conversations of items. Another tenant's is `NotFound`. See `memory.conversations.ConversationStore`."""

    async def create(
        self, tenant: str, metadata: Mapping[str, str], items: Sequence[dict[str, Any]]
    ) -> ConversationInfo: ...
    async def get(self, tenant: str, conversation_id: str) -> ConversationInfo: ...
    async def update(self, tenant: str, conversation_id: str, metadata: Mapping[str, str]) -> ConversationInfo: ...
    async def delete(self, tenant: str, conversation_id: str) -> None: ...
    async def add(self, tenant: str, conversation_id: str, items: Sequence[dict[str, Any]]) -> None: ...
    async def items(
        self, tenant: str, conversation_id: str, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[dict[str, Any]], bool]: ...
    async def all_items(self, tenant: str, conversation_id: str) -> list[dict[str, Any]]: ...
    async def item(self, tenant: str, conversation_id: str, item_id: str) -> dict[str, Any]: ...
    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> ConversationInfo: ...


class Responses(Protocol):
    """Kept answers of the Responses API. Another tenant's answer is `NotFound`. See
    `memory.responses.ResponseStore`."""

    @property
    def conversations(self) -> KeptConversations: ...

    async def begin(self, tenant: str, items: Sequence[dict[str, Any]], body: dict[str, Any]) -> None: ...
    async def finish(self, tenant: str, made: Made) -> bool: ...
    async def drop(self, tenant: str, response_id: str) -> None: ...
    async def recover(self, failed: Callable[[dict[str, Any]], dict[str, Any]]) -> int: ...
    async def get(self, tenant: str, response_id: str) -> KeptResponse: ...
    async def chain(self, tenant: str, response_id: str) -> list[KeptResponse]:
        """The answer and those it went on from, oldest first."""
        ...

    async def delete(self, tenant: str, response_id: str) -> None: ...


class Feedbacks(Protocol):
    """What people think of answers. Another tenant's rating is `NotFound`."""

    async def put(self, tenant: str, given: NewRating) -> Rating:
        """Keep a rating, in the place of an earlier one of the same answer."""
        ...

    async def get(self, tenant: str, rating_id: str) -> Rating: ...
    async def part(self, tenant: str, chosen: Chosen, part: Part) -> tuple[list[Rating], bool]:
        """(ratings, whether more follow)."""
        ...

    async def delete(self, tenant: str, rating_id: str) -> None: ...
    async def export(self, tenant: str) -> Iterator[tuple[Rating, RatedAnswer]]:
        """Every rating, oldest first, with what is kept of its answer; to be read in a thread."""
        ...


class VectorStoresApi(Protocol):
    """Named sets of files that are searched together. Another tenant's are `NotFound`."""

    async def run(self, work: Callable[[VectorStores], T]) -> T:
        """`work` in a thread: rows of stores, files and batches."""
        ...

    async def search(
        self,
        tenant: str,
        store_ids: Sequence[str],
        queries: Sequence[str],
        wanted: AttributeFilter | None,
        limit: int,
        min_score: float = 0.0,
    ) -> list[StoreHit]:
        """The best passages of the stores' files, best first."""
        ...


class KVView(Protocol):
    """KV and attention of the engine, for whoever runs the server. May be called from any thread."""

    def view(self, steps: int = 0) -> dict[str, Any]:
        """Bytes, counts, pressure, where time goes and what is wrong, as JSON values; with the figures of so many
        of the newest measured steps, layer by layer."""
        ...

    def debug(self, on: bool) -> None:
        """Measure every decode step from now on, or stop."""
        ...


class BackendsView(Protocol):
    """The backends of the router, for whoever runs the server."""

    def view(self) -> list[dict[str, Any]]:
        """Each one's state, as JSON values."""
        ...


class Embedding(Protocol):
    """`memory.memory.Memory`. Calls block."""

    @property
    def embedder_model(self) -> str | None:
        """None where there is no embedder."""
        ...

    @property
    def embedder_window(self) -> int | None: ...

    def embed(self, tenant: str, texts: Sequence[str], role: Role) -> Embedded:
        """Raises `EmbedderUnavailable`, `InvalidRequest` for a text that is too long."""
        ...


class ServiceApi(Protocol):
    """What `api` and `cli` call."""

    @property
    def backends(self) -> BackendsView: ...

    @property
    def documents(self) -> Documents: ...

    @property
    def uploads(self) -> Uploads: ...

    @property
    def batches(self) -> Batches: ...

    @property
    def conversations(self) -> Conversations: ...

    @property
    def responses(self) -> Responses: ...

    @property
    def feedback(self) -> Feedbacks: ...

    @property
    def vector_stores(self) -> VectorStoresApi: ...

    @property
    def kv(self) -> KVView: ...

    def run(self, request: Request) -> AsyncIterator[Event]:
        """Answer a request. Closing the iterator cancels the work in every phase within 50 ms.

        The first event comes before any slow work; errors are raised, before or between events.
        """
        ...

    async def count_tokens(self, request: Request) -> int:
        """The prompt's tokens if every document were read whole. Raises as `run` for what can't be composed."""
        ...

    async def embed(self, request: Request, role: Role, dimensions: int | None) -> Embedded:
        """What the messages' texts mean, each one's vector. Raises `ModelNotFound`, `InvalidRequest` for a number
        of `dimensions` that the embedder doesn't give, and as `Embedding.embed`."""
        ...

    async def balance(self, caller: Caller) -> Balance:
        """What the caller may still spend in this month."""
        ...

    async def estimate(self, request: Request) -> Plan:
        """The plan that `run` would choose now, found the same way, and nothing computed. Waits as `run` does for
        documents that are being read; raises what `run` raises before its plan."""
        ...

    async def forget_everything(self, tenant: str) -> None:
        """Delete a tenant's documents, sessions and all that was made of them; its keys stay."""
        ...

    def machine(self) -> dict[str, Any]:
        """What runs here and how well it fits, as JSON values. Takes milliseconds: call it in a thread."""
        ...

    async def authenticate(self, key: str | None) -> Caller:
        """Raises `Unauthenticated`. Without any stored key every caller is the local admin."""
        ...

    async def models(self) -> list[ModelCard]: ...

    async def ready(self) -> bool: ...
