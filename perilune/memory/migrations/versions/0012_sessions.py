"""Rows of sessions: titles, forks, and counts that a list needs. Filled from the turns that are there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("source_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.Column("turns", sa.Integer(), nullable=False),
        sa.Column("title", sa.Text(), nullable=True),
        sa.Column("parent_id", sa.String(length=64), nullable=True),
        sa.Column("parent_turn", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("tenant", "source_id", name=op.f("pk_sessions")),
    )
    op.create_index(op.f("ix_sessions_tenant"), "sessions", ["tenant", "updated_at"])
    op.execute(
        "INSERT INTO sessions (tenant, source_id, created_at, updated_at, turns) "
        "SELECT tenant, source_id, COALESCE(MIN(at), 0), COALESCE(MAX(at), 0), COUNT(*) "
        "FROM entries WHERE page IS NULL GROUP BY tenant, source_id"
    )


def downgrade() -> None:
    op.drop_table("sessions")
