"""Batches with their lines, uploads in parts, and files that expire."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("files", sa.Column("expires_at", sa.Float(), nullable=True))
    op.create_index(op.f("ix_files_expires_at"), "files", ["expires_at"])
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("filename", sa.String(length=255), nullable=False),
        sa.Column("purpose", sa.String(length=64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("file_id", sa.String(length=32), nullable=False),
        sa.Column("file_lasts_s", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
    )
    op.create_index(op.f("ix_uploads_tenant"), "uploads", ["tenant", "status"])
    op.create_table(
        "upload_parts",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("upload_id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_upload_parts")),
        sa.ForeignKeyConstraint(
            ["upload_id"], ["uploads.id"], name=op.f("fk_upload_parts_upload_id"), ondelete="CASCADE"
        ),
    )
    op.create_index(op.f("ix_upload_parts_upload_id"), "upload_parts", ["upload_id"])
    _batches()


def _batches() -> None:
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    op.create_table(
        "batches",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=16), nullable=True),
        sa.Column("endpoint", sa.String(length=64), nullable=False),
        sa.Column("completion_window", sa.String(length=16), nullable=False),
        sa.Column("input_file_id", sa.String(length=32), nullable=False),
        sa.Column("output_file_id", sa.String(length=32), nullable=True),
        sa.Column("error_file_id", sa.String(length=32), nullable=True),
        sa.Column("output_lasts_s", sa.Float(), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        *[sa.Column(f"{name}_at", sa.Float(), nullable=True) for name in times],
        *[sa.Column(name, sa.Integer(), nullable=False) for name in ("total", "completed", "failed")],
        sa.Column("errors", sa.Text(), nullable=True),
        sa.Column("metadata", sa.Text(), nullable=True),
        sa.Column("model", sa.String(length=256), nullable=True),
        *[sa.Column(f"{name}_tokens", sa.BigInteger(), nullable=False) for name in ("input", "cached", "output")],
        sa.Column("purge", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index(op.f("ix_batches_tenant"), "batches", ["tenant", "created_at"])
    op.create_index(op.f("ix_batches_status"), "batches", ["status"])
    op.create_table(
        "batch_lines",
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("custom_id", sa.Text(), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
        sa.Column("state", sa.Integer(), nullable=False),
        sa.Column("result", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("batch_id", "number", name=op.f("pk_batch_lines")),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name=op.f("fk_batch_lines_batch_id"), ondelete="CASCADE"
        ),
    )
    op.create_table(
        "batch_sources",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("source_id", sa.String(length=64), nullable=False),
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "source_id", "batch_id", name=op.f("pk_batch_sources")),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name=op.f("fk_batch_sources_batch_id"), ondelete="CASCADE"
        ),
    )


def downgrade() -> None:
    for name in ("batch_sources", "batch_lines", "batches", "upload_parts", "uploads"):
        op.drop_table(name)
    op.drop_index(op.f("ix_files_expires_at"), "files")
    with op.batch_alter_table("files") as table:
        table.drop_column("expires_at")
