"""What the service needs from the layers below, and what it offers to the layers above. Types only.

`build` hands real ones to the service; tests hand small fakes.
"""

from perilune.service.ports.api import (
    BackendsView,
    Batches,
    Caller,
    Conversations,
    Documents,
    Embedding,
    Feedbacks,
    KeptConversations,
    KVView,
    LineAnswer,
    LineAnswers,
    ModelCard,
    Responses,
    ServiceApi,
    Uploads,
    VectorStoresApi,
)
from perilune.service.ports.models import ChatTemplate, Engine, Grammars, StreamDecoder, T, Tokenizer
from perilune.service.ports.stores import Library, SessionStore

__all__ = [
    "BackendsView",
    "Batches",
    "Caller",
    "ChatTemplate",
    "Conversations",
    "Documents",
    "Embedding",
    "Engine",
    "Feedbacks",
    "Grammars",
    "KVView",
    "KeptConversations",
    "Library",
    "LineAnswer",
    "LineAnswers",
    "ModelCard",
    "Responses",
    "ServiceApi",
    "SessionStore",
    "StreamDecoder",
    "T",
    "Tokenizer",
    "Uploads",
    "VectorStoresApi",
]
