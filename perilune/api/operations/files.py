"""Files, uploads, batches and vector stores."""

from __future__ import annotations

from perilune.api.batches import WireBatch
from perilune.api.operations.table import (
    AFTER,
    CHANGING,
    COUNT,
    NUMBER,
    OBJECT,
    ORDER,
    PAGE,
    TEXT,
    WHOLE,
    YES,
    Operation,
    Query,
    Schema,
    deleted,
    limit,
    many,
    one_of,
    or_null,
    paged,
    ref,
    shape,
    some,
    thing,
    typed,
)
from perilune.api.uploads import WireComplete, WireUpload
from perilune.api.vector_store_schema import (
    WireFileBatch,
    WireFileChanges,
    WireNewStore,
    WireSearch,
    WireStoreChanges,
    WireStoreFile,
)
from perilune.errors import Unreadable

_AT = or_null(WHOLE)
_METADATA: Schema = {"type": "object", "additionalProperties": TEXT}
_ATTRIBUTES: Schema = {"type": "object", "additionalProperties": some(TEXT, NUMBER, YES)}
_COUNTS = shape(in_progress=COUNT, completed=COUNT, failed=COUNT, cancelled=COUNT, total=COUNT)
_STATES = one_of("in_progress", "completed", "failed", "cancelled")
_TEXT_PART = typed("text", text=TEXT)
_ENDS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")

SCHEMAS: dict[str, Schema] = {
    "File": thing(
        "file",
        id=TEXT,
        bytes=COUNT,
        created_at=WHOLE,
        expires_at=_AT,
        filename=TEXT,
        purpose=TEXT,
        status=one_of("uploaded", "processed", "error"),
        status_details=or_null(TEXT),
        perilune=shape(
            status=one_of("uploaded", "parsing", "prefilling", "processed", "error"),
            error_code=or_null(one_of(*Unreadable)),
            pages_total=or_null(COUNT),
            pages_parsed=COUNT,
            tokens=or_null(COUNT),
            language=or_null(TEXT),
            local_only=YES,
            sha256=TEXT,
        ),
    ),
    "FilePage": thing(
        "file.page",
        file_id=TEXT,
        filename=TEXT,
        page=COUNT,
        pages=COUNT,
        anchor=TEXT,
        start=COUNT,
        end=COUNT,
        text=TEXT,
        image=YES,
    ),
    "Upload": thing(
        "upload",
        id=TEXT,
        bytes=COUNT,
        created_at=WHOLE,
        expires_at=WHOLE,
        filename=TEXT,
        purpose=TEXT,
        status=one_of("pending", "completed", "cancelled", "expired"),
        file=or_null(ref("File")),
    ),
    "Batch": thing(
        "batch",
        id=TEXT,
        endpoint=TEXT,
        model=or_null(TEXT),
        errors=or_null(
            thing(
                "list",
                data=many(shape(code=TEXT, line=or_null(COUNT), message=TEXT, param=or_null(TEXT))),
            )
        ),
        input_file_id=TEXT,
        completion_window=TEXT,
        status=one_of("validating", *_ENDS),
        output_file_id=or_null(TEXT),
        error_file_id=or_null(TEXT),
        created_at=WHOLE,
        expires_at=WHOLE,
        **{f"{state}_at": _AT for state in _ENDS},
        request_counts=shape(total=COUNT, completed=COUNT, failed=COUNT),
        usage=ref("ResponseUsage"),
        metadata=or_null(_METADATA),
    ),
    "VectorStore": thing(
        "vector_store",
        id=TEXT,
        created_at=WHOLE,
        name=TEXT,
        description=or_null(TEXT),
        usage_bytes=COUNT,
        file_counts=_COUNTS,
        status=one_of("in_progress", "completed", "expired"),
        expires_after=or_null(shape(anchor={"const": "last_active_at"}, days=COUNT)),
        expires_at=_AT,
        last_active_at=WHOLE,
        metadata=_METADATA,
    ),
    "VectorStoreFile": thing(
        "vector_store.file",
        id=TEXT,
        created_at=WHOLE,
        vector_store_id=TEXT,
        status=_STATES,
        last_error=or_null(shape(code=TEXT, message=TEXT)),
        usage_bytes=COUNT,
        attributes=_ATTRIBUTES,
        chunking_strategy=typed("other"),
    ),
    "VectorStoreBatch": thing(
        "vector_store.files_batch",
        id=TEXT,
        created_at=WHOLE,
        vector_store_id=TEXT,
        status=_STATES,
        file_counts=_COUNTS,
    ),
}

_FORM = {
    **OBJECT,
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": TEXT, "local_only": TEXT},
    "required": ["file"],
}
_PART = {**OBJECT, "properties": {"data": {"type": "string", "format": "binary"}}, "required": ["data"]}
_LIST = (limit(10_000), ORDER, AFTER, Query("purpose", TEXT))
_RAW_OR_TEXT = (Query("format", one_of("raw", "text")),)
_WIDTH = (Query("width", {"type": "integer", "minimum": 100, "maximum": 2000}),)
_FILE, _UPLOAD, _BATCH = "/v1/files/{file_id}", "/v1/uploads/{upload_id}", "/v1/batches/{batch_id}"

FILES: tuple[Operation, ...] = (
    Operation("POST", "/v1/files", "Upload a file", ref("File"), form=_FORM, fails=(409, 422)),
    Operation("GET", "/v1/files", "List files", paged(ref("File")), queries=_LIST, fails=()),
    Operation("GET", _FILE, "A file and its ingest", ref("File")),
    Operation("DELETE", _FILE, "Delete a file and all made of it", deleted("file"), fails=(404, 409)),
    Operation(
        "GET",
        f"{_FILE}/content",
        "The file, or its text",
        texts=("application/octet-stream", "text/plain"),
        queries=_RAW_OR_TEXT,
        fails=CHANGING,
    ),
    Operation("GET", f"{_FILE}/pages/{{page}}", "One page's text", ref("FilePage"), fails=CHANGING),
    Operation(
        "GET",
        f"{_FILE}/pages/{{page}}/image",
        "A picture of a page",
        texts=("image/png",),
        queries=_WIDTH,
        fails=CHANGING,
    ),
    Operation("POST", "/v1/uploads", "Begin an upload in parts", ref("Upload"), WireUpload, fails=(409, 422)),
    Operation(
        "POST",
        f"{_UPLOAD}/parts",
        "Send a part",
        thing("upload.part", id=TEXT, created_at=WHOLE, upload_id=TEXT),
        form=_PART,
        fails=(404, 409),
    ),
    Operation("POST", f"{_UPLOAD}/complete", "Make the parts a file", ref("Upload"), WireComplete, fails=CHANGING),
    Operation("POST", f"{_UPLOAD}/cancel", "Drop an upload", ref("Upload"), fails=(404, 409)),
    Operation("GET", "/v1/batches", "List batches", paged(ref("Batch")), queries=(limit(100), AFTER)),
    Operation("POST", "/v1/batches", "Begin a batch", ref("Batch"), WireBatch, fails=(*CHANGING, 429)),
    Operation("GET", _BATCH, "A batch", ref("Batch")),
    Operation("POST", f"{_BATCH}/cancel", "Cancel a batch", ref("Batch"), fails=(404, 409)),
)

_ROOT = "/v1/vector_stores"
_STORE = f"{_ROOT}/{{vector_store_id}}"
_STORED, _ADDED = f"{_STORE}/files/{{file_id}}", f"{_STORE}/file_batches/{{batch_id}}"
_FILTERED = (*PAGE, Query("filter", _STATES))
_END: dict[str, Schema] = {"has_more": {"const": False}, "next_page": {"type": "null"}}
_HITS = thing(
    "vector_store.search_results.page",
    search_query=many(TEXT),
    data=many(
        shape(
            file_id=TEXT,
            filename=TEXT,
            score=NUMBER,
            attributes=_ATTRIBUTES,
            content=many(_TEXT_PART),
            page=COUNT,
            start=COUNT,
            end=COUNT,
        )
    ),
    **_END,
)
_CONTENT = thing(
    "vector_store.file_content.page",
    file_id=TEXT,
    filename=TEXT,
    attributes=_ATTRIBUTES,
    data=many(_TEXT_PART),
    **_END,
)

STORES: tuple[Operation, ...] = (
    Operation("GET", _ROOT, "List vector stores", paged(ref("VectorStore")), queries=PAGE),
    Operation(
        "POST",
        _ROOT,
        "Make a vector store",
        ref("VectorStore"),
        WireNewStore,
        may_be_empty=True,
        fails=CHANGING,
    ),
    Operation("GET", _STORE, "A vector store", ref("VectorStore")),
    Operation("POST", _STORE, "Change it", ref("VectorStore"), WireStoreChanges, may_be_empty=True, fails=CHANGING),
    Operation("DELETE", _STORE, "Delete it; files stay", deleted("vector_store.deleted")),
    Operation("POST", f"{_STORE}/search", "Search its files", _HITS, WireSearch, fails=CHANGING),
    Operation("GET", f"{_STORE}/files", "Its files", paged(ref("VectorStoreFile")), queries=_FILTERED),
    Operation("POST", f"{_STORE}/files", "Add a file", ref("VectorStoreFile"), WireStoreFile, fails=CHANGING),
    Operation("GET", _STORED, "A file of it", ref("VectorStoreFile")),
    Operation(
        "POST", _STORED, "Change a file's attributes", ref("VectorStoreFile"), WireFileChanges, fails=CHANGING
    ),
    Operation("DELETE", _STORED, "Take a file out", deleted("vector_store.file.deleted")),
    Operation("GET", f"{_STORED}/content", "A file's text", _CONTENT, fails=CHANGING),
    Operation(
        "POST", f"{_STORE}/file_batches", "Add files", ref("VectorStoreBatch"), WireFileBatch, fails=CHANGING
    ),
    Operation("GET", _ADDED, "How adding goes", ref("VectorStoreBatch")),
    Operation("POST", f"{_ADDED}/cancel", "Stop adding", ref("VectorStoreBatch"), fails=CHANGING),
    Operation(
        "GET", f"{_ADDED}/files", "The files that are added", paged(ref("VectorStoreFile")), queries=_FILTERED
    ),
)
