"""How answers of sessions came about: plan, deadline, times, tokens, places of citations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("answers", sa.Column("details", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("answers", "details")
