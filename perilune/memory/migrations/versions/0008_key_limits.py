"""Limits of keys, and what each has used, day by day."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0006"
branch_labels = None
depends_on = None

_LIMITS = (
    ("requests_per_minute", sa.Integer()),
    ("tokens_per_minute", sa.BigInteger()),
    ("tokens_per_day", sa.BigInteger()),
    ("concurrency", sa.Integer()),
    ("budget", sa.Float()),
    ("stream_tokens_per_s", sa.Float()),
)


def upgrade() -> None:
    for name, kind in _LIMITS:
        op.add_column("keys", sa.Column(name, kind, nullable=True))
    op.create_table(
        "usage",
        sa.Column("key_id", sa.String(length=16), nullable=False),
        sa.Column("day", sa.String(length=10), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", "day", name=op.f("pk_usage")),
    )


def downgrade() -> None:
    op.drop_table("usage")
    for name, _ in _LIMITS:
        op.drop_column("keys", name)
