"""Entries that a search finds, their term counts and vectors, and what the index has yet to learn.

Entries of files that are there are made from their passages when memory starts (memory/passages.py).
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "entries",
        sa.Column("id", _ID, nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("source_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("page", sa.Integer(), nullable=True),
        sa.Column("start", sa.BigInteger(), nullable=True),
        sa.Column("end", sa.BigInteger(), nullable=True),
        sa.Column("speaker", sa.String(length=128), nullable=True),
        sa.Column("at", sa.Float(), nullable=True),
        sa.Column("entities", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=True),
        sa.Column("terms", sa.LargeBinary(), nullable=False),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_entries")),
        sa.UniqueConstraint("tenant", "source_id", "number", name=op.f("uq_entries_tenant")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_entries_tenant"), "entries", ["tenant", "at"])
    op.create_table(
        "term_counts",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("term", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("entries", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "term", name=op.f("pk_term_counts")),
    )
    op.create_table(
        "corpora",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("entries", sa.BigInteger(), nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name=op.f("pk_corpora")),
    )
    op.create_table(
        "vectors",
        sa.Column("entry_id", _ID, nullable=False),
        sa.Column("model", sa.String(length=128), nullable=False),
        sa.Column("vector", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["entry_id"], ["entries.id"], name=op.f("fk_vectors_entry_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("entry_id", "model", name=op.f("pk_vectors")),
    )
    op.create_table(
        "index_work",
        sa.Column("entry_id", _ID, autoincrement=False, nullable=False),
        sa.Column("task", sa.String(length=8), nullable=False),
        sa.PrimaryKeyConstraint("entry_id", "task", name=op.f("pk_index_work")),
    )


def downgrade() -> None:
    for name in ("index_work", "vectors", "corpora", "term_counts", "entries"):
        op.drop_table(name)
