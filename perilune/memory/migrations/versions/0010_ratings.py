"""What people think of answers, and which turns of a session an answer's id stands for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "answers",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("source_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_answers")),
    )
    op.create_index(op.f("ix_answers_tenant"), "answers", ["tenant", "source_id"])
    op.create_table(
        "ratings",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("answer_id", sa.String(length=64), nullable=False),
        sa.Column("rating", sa.String(length=8), nullable=False),
        sa.Column("reason", sa.String(length=32), nullable=True),
        sa.Column("comment", sa.Text(), nullable=True),
        sa.Column("source_id", sa.String(length=64), nullable=True),
        sa.Column("number", sa.Integer(), nullable=True),
        sa.Column("response_id", sa.String(length=64), nullable=True),
        sa.Column("mark_id", sa.String(length=32), nullable=True),
        sa.Column("span_source_id", sa.String(length=64), nullable=True),
        sa.Column("span_turn", sa.Integer(), nullable=True),
        sa.Column("span_page", sa.Integer(), nullable=True),
        sa.Column("span_start", sa.BigInteger(), nullable=True),
        sa.Column("span_end", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["response_id"], ["responses.id"], name=op.f("fk_ratings_response_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ratings")),
        sa.UniqueConstraint("tenant", "answer_id", name=op.f("uq_ratings_tenant")),
    )
    op.create_index(op.f("ix_ratings_tenant"), "ratings", ["tenant", "created_at"])


def downgrade() -> None:
    op.drop_table("ratings")
    op.drop_table("answers")
