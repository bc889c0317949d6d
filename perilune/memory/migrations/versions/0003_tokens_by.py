"""Which model a file's tokens were counted by."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("files", sa.Column("tokens_by", sa.String(length=128), nullable=True))


def downgrade() -> None:
    op.drop_column("files", "tokens_by")
