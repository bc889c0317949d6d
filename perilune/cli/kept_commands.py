"""The options of `perilune documents`, `feedback` and `ps`; the work is `cli/kept.py`'s, loaded when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

documents_app = typer.Typer(help="Documents of the running server.", no_args_is_help=True)
feedback_app = typer.Typer(help="Ratings of answers.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write here; else to stdout.")]


@documents_app.command("ls")
def documents_ls(ctx: typer.Context, as_json: Json = False) -> None:
    """List documents, the newest first."""
    from perilune.cli import kept as verb

    verb.show_documents(ctx.obj.settings(), as_json)


@documents_app.command("rm")
@documents_app.command("delete", hidden=True)
def documents_rm(
    ctx: typer.Context,
    documents: Annotated[list[str], typer.Argument(help="Ids, as `documents ls` and `ingest` print them.")],
    as_json: Json = False,
) -> None:
    """Delete documents, and their text, index and KV."""
    from perilune.cli import kept as verb

    verb.delete_documents(ctx.obj.settings(), documents, as_json)


@feedback_app.command("export")
def feedback_export(ctx: typer.Context, output: Output = None) -> None:
    """Write every rating of an answer, as JSON Lines."""
    from perilune.cli import kept as verb

    verb.export_feedback(ctx.obj.settings(), output)


def ps(ctx: typer.Context, as_json: Json = False) -> None:
    """Show the running server: its address, process and model. Exit code 3 where none runs."""
    from perilune.cli import kept as verb

    verb.show_server(ctx.obj.settings(), as_json)
