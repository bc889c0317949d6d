"""Why a document can't be read, as a code."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("files", sa.Column("error_code", sa.String(length=32), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("files") as table:
        table.drop_column("error_code")
