"""Answers that are made in the background, what kept answers take, and conversations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("responses", sa.Column("size", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("responses", sa.Column("conversation_id", sa.String(length=64), nullable=True))
    op.add_column("responses", sa.Column("runner", sa.String(length=64), nullable=True))
    op.add_column("responses", sa.Column("events", sa.LargeBinary(), nullable=True))
    op.execute("UPDATE responses SET size = length(input) + length(body)")
    op.create_index(op.f("ix_responses_size"), "responses", ["tenant", "size"])
    op.create_index(op.f("ix_responses_runner"), "responses", ["runner"])
    op.create_index(op.f("ix_responses_conversation"), "responses", ["conversation_id"])
    op.create_table(
        "conversations",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("last_at", sa.Float(), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_conversations")),
    )
    op.create_index(op.f("ix_conversations_tenant"), "conversations", ["tenant", "last_at"])
    op.create_table(
        "conversation_items",
        sa.Column("conversation_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("id", sa.String(length=96), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("item", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["conversation_id"],
            ["conversations.id"],
            name=op.f("fk_conversation_items_conversation_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("conversation_id", "number", name=op.f("pk_conversation_items")),
        sa.UniqueConstraint("conversation_id", "id", name=op.f("uq_conversation_items_conversation_id")),
    )
    op.create_index(op.f("ix_conversation_items_size"), "conversation_items", ["tenant", "size"])


def downgrade() -> None:
    op.drop_table("conversation_items")
    op.drop_table("conversations")
    for name in ("conversation", "runner", "size"):
        op.drop_index(op.f(f"ix_responses_{name}"), "responses")
    for name in ("events", "runner", "conversation_id", "size"):
        op.drop_column("responses", name)
