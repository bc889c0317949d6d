"""Runs migrations on the connection that `store` hands over. Only ever called by `store`."""

from __future__ import annotations

from alembic import context

from perilune.memory.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,  # SQLite alters a table by copying it
)
with context.begin_transaction():
    context.run_migrations()
