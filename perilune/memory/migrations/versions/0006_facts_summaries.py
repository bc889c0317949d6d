"""Facts about users, summaries of sessions and documents, and what users corrected in them.

Summaries of what is there are made in the background: `summary_work` is filled from the entries. Facts are
learnt from what is said from now on.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _of_source() -> tuple[sa.Column[str], sa.Column[str]]:
    return (
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("source_id", sa.String(length=64), nullable=False),
    )


def upgrade() -> None:
    op.create_table(
        "facts",
        sa.Column("id", _ID, nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("ends", sa.Boolean(), nullable=False),
        sa.Column("source_id", sa.String(length=64), nullable=True),
        sa.Column("number", sa.Integer(), nullable=True),
        sa.Column("start", sa.Integer(), nullable=True),
        sa.Column("end", sa.Integer(), nullable=True),
        sa.Column("event_at", sa.Float(), nullable=False),
        sa.Column("written_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_facts")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_facts_tenant"), "facts", ["tenant", "key"])
    op.create_index("ix_facts_source", "facts", ["tenant", "source_id"])
    op.create_table(
        "summaries",
        *_of_source(),
        sa.Column("level", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sentences", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "source_id", "level", "number", name=op.f("pk_summaries")),
    )
    op.create_table(
        "summary_work",
        *_of_source(),
        sa.Column("entries", sa.Integer(), nullable=False),
        sa.Column("done", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "source_id", name=op.f("pk_summary_work")),
    )
    op.create_table(
        "corrections",
        *_of_source(),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("start", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("end", sa.Integer(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("written_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "source_id", "number", "start", name=op.f("pk_corrections")),
    )
    op.execute(
        "INSERT INTO summary_work (tenant, source_id, entries, done) "
        "SELECT tenant, source_id, MAX(number) + 1, 0 FROM entries GROUP BY tenant, source_id"
    )


def downgrade() -> None:
    for name in ("corrections", "summary_work", "summaries", "facts"):
        op.drop_table(name)
