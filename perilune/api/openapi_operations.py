"""Every operation of the HTTP API, and the schemas that they name: the tables of operations/, together.

openapi.py makes the document of them. A test compares the operations with the routes.
"""

from __future__ import annotations

from perilune.api.operations import chat, files, memory, messages, responses, running
from perilune.api.operations.table import Operation, Schema

OPERATIONS: tuple[Operation, ...] = (
    *chat.OPERATIONS,
    *messages.OPERATIONS,
    *responses.OPERATIONS,
    *files.FILES,
    *files.STORES,
    *memory.SESSIONS,
    *memory.MEMORY,
    *memory.FEEDBACK,
    *running.OPERATIONS,
)

SCHEMAS: dict[str, Schema] = {
    **chat.SCHEMAS,
    **messages.SCHEMAS,
    **responses.SCHEMAS,
    **files.SCHEMAS,
    **memory.SCHEMAS,
    **running.SCHEMAS,
}
