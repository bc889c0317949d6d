"""Where a page is, for people, and a digest of what it was made of, so that an unchanged one is taken over."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("pages", sa.Column("anchor", sa.Text(), nullable=False, server_default=""))
    op.add_column("pages", sa.Column("digest", sa.String(length=32), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("pages", "digest")
    op.drop_column("pages", "anchor")
