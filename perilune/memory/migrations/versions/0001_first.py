"""Tenants, keys, files, pages, passages and postings."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("filename", sa.String(length=255), nullable=False),
        sa.Column("purpose", sa.String(length=64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("pages_total", sa.Integer(), nullable=True),
        sa.Column("pages_parsed", sa.Integer(), nullable=False),
        sa.Column("passages", sa.Integer(), nullable=False),
        sa.Column("chars", sa.BigInteger(), nullable=False),
        sa.Column("text_complete", sa.Boolean(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=True),
        sa.Column("language", sa.String(length=16), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index(op.f("ix_files_status"), "files", ["status"])
    op.create_index(op.f("ix_files_tenant"), "files", ["tenant", "created_at"])
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("secret", sa.LargeBinary(length=32), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("mac", sa.LargeBinary(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("deadline_s", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("last_used_at", sa.Float(), nullable=True),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.CheckConstraint("role IN ('admin', 'user', 'read-only')", name=op.f("ck_keys_role")),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_keys_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
        sa.UniqueConstraint("mac", name=op.f("uq_keys_mac")),
    )
    op.create_table(
        "pages",
        sa.Column("file_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], name=op.f("fk_pages_file_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("file_id", "number", name=op.f("pk_pages")),
    )
    op.create_table(
        "passages",
        sa.Column("file_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("page", sa.Integer(), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("end", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], name=op.f("fk_passages_file_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("file_id", "number", name=op.f("pk_passages")),
    )
    op.create_table(
        "postings",
        sa.Column("file_id", sa.String(length=32), nullable=False),
        sa.Column("first_passage", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], name=op.f("fk_postings_file_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("file_id", "first_passage", name=op.f("pk_postings")),
    )


def downgrade() -> None:
    op.drop_table("postings")
    op.drop_table("passages")
    op.drop_table("pages")
    op.drop_table("keys")
    op.drop_table("tenants")
    op.drop_table("files")
