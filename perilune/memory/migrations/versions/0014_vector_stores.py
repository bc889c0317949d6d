"""Vector stores: named sets of files that are searched together."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "vector_stores",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("last_active_at", sa.Float(), nullable=False),
        sa.Column("expires_days", sa.Integer(), nullable=True),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_vector_stores")),
    )
    op.create_index(op.f("ix_vector_stores_tenant"), "vector_stores", ["tenant", "created_at"])
    op.create_table(
        "store_batches",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("store_id", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("cancelled", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["store_id"], ["vector_stores.id"], name=op.f("fk_store_batches_store_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_store_batches")),
    )
    op.create_table(
        "store_files",
        sa.Column("store_id", sa.String(length=32), nullable=False),
        sa.Column("file_id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("batch_id", sa.String(length=32), nullable=True),
        sa.Column("cancelled", sa.Boolean(), nullable=False),
        sa.Column("attributes", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["store_id"], ["vector_stores.id"], name=op.f("fk_store_files_store_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], name=op.f("fk_store_files_file_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("store_id", "file_id", name=op.f("pk_store_files")),
    )
    op.create_index(op.f("ix_store_files_file_id"), "store_files", ["file_id"])
    op.create_index(op.f("ix_store_files_batch_id"), "store_files", ["batch_id"])


def downgrade() -> None:
    op.drop_table("store_files")
    op.drop_table("store_batches")
    op.drop_table("vector_stores")
