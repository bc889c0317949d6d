"""The tables. Knows SQLAlchemy Core types that SQLite and PostgreSQL share, and nothing of what is done with rows.

A table with a tenant and a source is emptied with the source and with the tenant (`entries`), without being named.
A change here needs a migration in `migrations/versions`; a test compares the two. Deleting a file deletes its
pages, passages and postings by cascade; its entries go with `entries.remove_source`, which also keeps the counts.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

HEAD = "0017"
"""The migration this code needs; the store upgrades a database that has another."""

METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

TENANTS = Table(
    "tenants",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("secret", LargeBinary(32), nullable=False),  # salts KV hashes, so that tenants never share KV
    Column("created_at", Float, nullable=False),
)

KEYS = Table(
    "keys",
    METADATA,
    Column("id", String(16), primary_key=True),
    Column(
        "mac", LargeBinary(32), nullable=False, unique=True
    ),  # HMAC-SHA256(pepper, key); the key is stored nowhere
    Column("tenant", String(64), ForeignKey("tenants.id"), nullable=False),
    Column("name", String(128), nullable=False),
    Column("role", String(16), nullable=False),
    Column("deadline_s", Float),
    Column("created_at", Float, nullable=False),
    Column("last_used_at", Float),
    Column("revoked_at", Float),
    Column("requests_per_minute", Integer),  # limits; null is none of its own
    Column("tokens_per_minute", BigInteger),
    Column("tokens_per_day", BigInteger),
    Column("concurrency", Integer),
    Column("budget", Float),
    Column("stream_tokens_per_s", Float),
    CheckConstraint("role IN ('admin', 'user', 'read-only')", name="role"),
)

USAGE = Table(
    "usage",
    METADATA,
    Column("key_id", String(16), primary_key=True),  # or `local`, without a key
    Column("day", String(10), primary_key=True),  # UTC, as 2026-11-30
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cost", Float, nullable=False),
)

AUDIT = Table(  # rows are only ever added; triggers refuse anything else
    "audit",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("actor", String(128), nullable=False),
    Column("action", String(32), nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("subject", String(64), nullable=False),
    Column("outcome", String(16), nullable=False),
)

RESPONSES = Table(
    "responses",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("previous_id", String(64)),  # the answer that this one went on from
    Column("input", Text, nullable=False),  # JSON: this answer's own items
    Column("body", Text, nullable=False),  # JSON: the answer as it was given, or as far as it is
    Column(
        "size", BigInteger, nullable=False, server_default="0"
    ),  # of input, body and events: the quota counts it
    Column("conversation_id", String(64)),
    Column("runner", String(64)),  # whose process makes the answer; null: it is made
    Column("events", LargeBinary),  # the stream of a background answer, compressed
    Index(None, "tenant", "created_at"),
    Index("ix_responses_size", "tenant", "size"),
    Index("ix_responses_runner", "runner"),
    Index("ix_responses_conversation", "conversation_id"),
)

CONVERSATIONS = Table(  # of OpenAI's Conversations API (memory/conversations.py)
    "conversations",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("last_at", Float, nullable=False),  # when an item was last added
    Column("metadata", Text, nullable=False),  # JSON, the caller's own
    Index(None, "tenant", "last_at"),
)

CONVERSATION_ITEMS = Table(
    "conversation_items",
    METADATA,
    Column("conversation_id", String(64), ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),  # order of arrival
    Column("id", String(96), nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("size", Integer, nullable=False),  # characters of the item
    Column("item", Text, nullable=False),  # JSON
    UniqueConstraint("conversation_id", "id"),
    Index("ix_conversation_items_size", "tenant", "size"),
)

FILES = Table(
    "files",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("filename", String(255), nullable=False),
    Column("purpose", String(64), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("status", String(16), nullable=False),
    Column("pages_total", Integer),
    Column("pages_parsed", Integer, nullable=False),
    Column("passages", Integer, nullable=False),
    Column("chars", BigInteger, nullable=False),
    Column("text_complete", Boolean, nullable=False),
    Column("tokens", BigInteger),
    Column("tokens_by", String(128)),  # the model that counted them
    Column("language", String(16)),
    Column("error", Text),
    Column("error_code", String(32)),
    Column("expires_at", Float),  # null: it stays until somebody deletes it
    Index(None, "tenant", "created_at"),
    Index(None, "status"),
    Index(None, "expires_at"),
)


def _of_file() -> Column[str]:
    return Column("file_id", String(32), ForeignKey("files.id", ondelete="CASCADE"), primary_key=True)


PAGES = Table(
    "pages",
    METADATA,
    _of_file(),
    Column("number", Integer, primary_key=True, autoincrement=False),  # counts from 1
    Column("start", BigInteger, nullable=False),  # characters in the whole text
    Column("text", Text, nullable=False),
    Column("anchor", Text, nullable=False, server_default=""),  # where it is, where its number says little
    Column("digest", String(32), nullable=False, server_default=""),  # what it was made of (memory/reuse.py)
)

PASSAGES = Table(
    "passages",
    METADATA,
    _of_file(),
    Column("number", Integer, primary_key=True, autoincrement=False),  # counts from 0
    Column("page", Integer, nullable=False),
    Column("start", BigInteger, nullable=False),
    Column("end", BigInteger, nullable=False),
)

POSTINGS = Table(
    "postings",
    METADATA,
    _of_file(),
    Column("first_passage", Integer, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),  # the format is memory/postings.py
)

_ENTRY_ID = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up only what it calls INTEGER

ENTRIES = Table(  # what a search finds: a passage of a file, a turn of a session
    "entries",
    METADATA,
    Column("id", _ENTRY_ID, primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("source_id", String(64), nullable=False),  # a file's or a session's id
    Column("number", Integer, nullable=False),  # place in the source, from 0
    Column("page", Integer),
    Column("start", BigInteger),  # characters in the file's whole text
    Column("end", BigInteger),
    Column("speaker", String(128)),
    Column("at", Float),  # when it was said, or when the file came
    Column("entities", Text, nullable=False),  # names, one a line (memory/entities.py)
    Column("text", Text),  # of a turn; a passage's lies in its page
    Column("terms", LargeBinary, nullable=False),  # the format is memory/scoring.py
    Column("length", Integer, nullable=False),  # in terms, as BM25 weighs it
    UniqueConstraint("tenant", "source_id", "number"),
    Index(None, "tenant", "at"),
    sqlite_autoincrement=True,  # ids are never given twice, because an index may still know the old one
)

SESSIONS = Table(  # what a list of sessions shows; the turns are entries (memory/session_rows.py)
    "sessions",
    METADATA,
    Column("tenant", String(64), primary_key=True),
    Column("source_id", String(64), primary_key=True),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("turns", Integer, nullable=False),
    Column("title", Text),  # the user's own
    Column("parent_id", String(64)),  # the session it was forked from
    Column("parent_turn", Integer),  # how many of its turns it took over
    Index(None, "tenant", "updated_at"),
)

TERM_COUNTS = Table(  # how many of a tenant's entries hold a term
    "term_counts",
    METADATA,
    Column("tenant", String(64), primary_key=True),
    Column("term", BigInteger, primary_key=True, autoincrement=False),  # the hash, as a signed number
    Column("entries", Integer, nullable=False),
)

CORPORA = Table(
    "corpora",
    METADATA,
    Column("tenant", String(64), primary_key=True),
    Column("entries", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),  # of all entries together
)

VECTORS = Table(
    "vectors",
    METADATA,
    Column("entry_id", _ENTRY_ID, ForeignKey("entries.id", ondelete="CASCADE"), primary_key=True),
    Column("model", String(128), primary_key=True),
    Column("vector", LargeBinary, nullable=False),  # float16, little-endian, of length 1
)

INDEX_WORK = Table(  # what the index does not know yet; written in the transaction that makes it necessary
    "index_work",
    METADATA,
    Column("entry_id", _ENTRY_ID, primary_key=True, autoincrement=False),
    Column("task", String(8), primary_key=True),  # text, vector, gone
)

FACTS = Table(  # what users said about themselves; nothing is overwritten (memory/profile.py)
    "facts",
    METADATA,
    Column("id", _ENTRY_ID, primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("key", String(64), nullable=False),
    Column("value", Text, nullable=False),
    Column("ends", Boolean, nullable=False),  # says that the value is no longer true
    Column("source_id", String(64)),  # the session it was said in; null: written by the user's own hand
    Column("number", Integer),  # the turn's place in it, from 0
    Column("start", Integer),  # characters of the turn: the sentence
    Column("end", Integer),
    Column("event_at", Float, nullable=False),  # since when it is true
    Column("written_at", Float, nullable=False),
    Index(None, "tenant", "key"),
    Index("ix_facts_source", "tenant", "source_id"),
    sqlite_autoincrement=True,
)

SUMMARIES = Table(  # places of sentences, no text; the format and the tree are memory/summaries.py
    "summaries",
    METADATA,
    Column("tenant", String(64), primary_key=True),
    Column("source_id", String(64), primary_key=True),
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),  # place in the level, from 0
    Column("sentences", LargeBinary, nullable=False),
)

SUMMARY_WORK = Table(  # how many entries a source has, and how many of them are summarised
    "summary_work",
    METADATA,
    Column("tenant", String(64), primary_key=True),
    Column("source_id", String(64), primary_key=True),
    Column("entries", Integer, nullable=False),
    Column("done", Integer, nullable=False),
)

CORRECTIONS = Table(  # sentences that a user rewrote, or struck out (text is empty)
    "corrections",
    METADATA,
    Column("tenant", String(64), primary_key=True),
    Column("source_id", String(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),  # of the entry
    Column("start", Integer, primary_key=True, autoincrement=False),  # characters of the entry's text
    Column("end", Integer, nullable=False),
    Column("text", Text, nullable=False),
    Column("written_at", Float, nullable=False),
)

DERIVED = (FACTS, SUMMARIES, SUMMARY_WORK, CORRECTIONS)
"""What is made of a source's entries, or said about them, and goes with them (`entries.remove_source`)."""

LOCAL_ONLY = Table(  # sources whose text leaves this machine in no way (memory/locality.py)
    "local_only",
    METADATA,
    Column("tenant", String(64), primary_key=True),
    Column("source_id", String(64), primary_key=True),
)

FEEDBACK = Table(  # where users found what a search had not (memory/feedback.py)
    "feedback",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("source_id", String(64), nullable=False),
    Column("first", Integer, nullable=False),  # entries of the source: the marked span
    Column("last", Integer, nullable=False),
    Column("question", Text, nullable=False),
    Column("at", Float, nullable=False),
    Column("model", String(128)),
    Column("vector", LargeBinary),  # of the question; as in `vectors`
    Index(None, "tenant", "source_id"),
)

ANSWERS = Table(  # which turns of a session an answer's id stands for (memory/ratings.py)
    "answers",
    METADATA,
    Column("id", String(64), primary_key=True),  # without the dialect's prefix
    Column("tenant", String(64), nullable=False),
    Column("source_id", String(64), nullable=False),
    Column("number", Integer, nullable=False),  # of the question's entry
    Column("model", String(256), nullable=False),
    Column("details", Text),  # JSON: how it came about (memory/answers.py)
    Index(None, "tenant", "source_id"),
)

RATINGS = Table(  # what people think of answers; no text of the answers (memory/ratings.py)
    "ratings",
    METADATA,
    Column("id", String(40), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("answer_id", String(64), nullable=False),
    Column("rating", String(8), nullable=False),
    Column("reason", String(32)),
    Column("comment", Text),
    Column("source_id", String(64)),  # the session that keeps the answer
    Column("number", Integer),  # of the question's entry in it
    Column("response_id", String(64), ForeignKey("responses.id", ondelete="CASCADE")),  # or the kept response
    Column("mark_id", String(32)),  # in `feedback`
    Column("span_source_id", String(64)),  # where the right answer stands
    Column("span_turn", Integer),  # counts from 1
    Column("span_page", Integer),
    Column("span_start", BigInteger),
    Column("span_end", BigInteger),
    UniqueConstraint("tenant", "answer_id"),
    Index(None, "tenant", "created_at"),
)

VECTOR_STORES = Table(  # named sets of files that are searched together (memory/vector_stores.py)
    "vector_stores",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("name", Text, nullable=False),
    Column("description", Text),
    Column("created_at", Float, nullable=False),
    Column("last_active_at", Float, nullable=False),
    Column("expires_days", Integer),  # since it was last active
    Column("metadata", Text, nullable=False),  # JSON
    Index(None, "tenant", "created_at"),
)


def _of_store(primary_key: bool) -> Column[str]:
    reference = ForeignKey("vector_stores.id", ondelete="CASCADE")
    return Column("store_id", String(32), reference, primary_key=primary_key, nullable=False)


STORE_BATCHES = Table(  # files that were put into a store together
    "store_batches",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("tenant", String(64), nullable=False),
    _of_store(primary_key=False),
    Column("created_at", Float, nullable=False),
    Column("cancelled", Boolean, nullable=False),
)

STORE_FILES = Table(
    "store_files",
    METADATA,
    _of_store(primary_key=True),
    _of_file(),
    Column("tenant", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("batch_id", String(32)),
    Column("cancelled", Boolean, nullable=False),  # its batch was, before it was read
    Column("attributes", Text, nullable=False),  # JSON
    Index(None, "file_id"),
    Index(None, "batch_id"),
)

UPLOADS = Table(  # files that arrive in parts; `file_id` is the file they become
    "uploads",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("filename", String(255), nullable=False),
    Column("purpose", String(64), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),  # as announced
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("status", String(16), nullable=False),  # pending, completed, cancelled, expired
    Column("file_id", String(32), nullable=False),
    Column("file_lasts_s", Float),  # how long the file is kept; null: until somebody deletes it
    Index(None, "tenant", "status"),
)

UPLOAD_PARTS = Table(
    "upload_parts",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("upload_id", String(64), ForeignKey("uploads.id", ondelete="CASCADE"), nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Index(None, "upload_id"),
)

BATCHES = Table(
    "batches",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("key_id", String(16)),  # whose limits its lines are held to; null: made without a key
    Column("endpoint", String(64), nullable=False),
    Column("completion_window", String(16), nullable=False),  # as it was asked for: 24h
    Column("input_file_id", String(32), nullable=False),
    Column("output_file_id", String(32)),
    Column("error_file_id", String(32)),
    Column("output_lasts_s", Float),
    Column("status", String(16), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("in_progress_at", Float),
    Column("finalizing_at", Float),
    Column("completed_at", Float),
    Column("failed_at", Float),
    Column("expired_at", Float),
    Column("cancelling_at", Float),
    Column("cancelled_at", Float),
    Column("total", Integer, nullable=False),  # lines
    Column("completed", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("errors", Text),  # JSON: what is wrong with the input
    Column("metadata", Text),  # JSON: the caller's
    Column("model", String(256)),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("purge", Boolean, nullable=False),  # something it quotes was deleted: so are its results, soon
    Index(None, "tenant", "created_at"),
    Index(None, "status"),
)

BATCH_LINES = Table(  # the text of a line lies in the input file; its result here, until the output file is made
    "batch_lines",
    METADATA,
    Column("batch_id", String(64), ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),  # from 0, in order of the input
    Column("custom_id", Text, nullable=False),
    Column("start", BigInteger, nullable=False),  # bytes in the input file
    Column("size_bytes", Integer, nullable=False),
    Column("state", Integer, nullable=False),  # 0 waits, 1 has an answer, 2 has an error
    Column("result", Text),  # JSON: the line of the output or error file
)

BATCH_SOURCES = Table(  # what batches quote or talk in: files and sessions
    "batch_sources",
    METADATA,
    Column("tenant", String(64), primary_key=True),
    Column("source_id", String(64), primary_key=True),
    Column("batch_id", String(64), ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
)
