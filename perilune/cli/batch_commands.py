"""The options of `perilune batch`; the work is `cli/batch.py`'s, loaded when a verb runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

batch_app = typer.Typer(
    help="Run many requests from a file, when nothing else is to be done.", no_args_is_help=True
)

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="The batch's id.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the answers here; else to stdout.")]
Errors = Annotated[Path | None, typer.Option("--errors", help="Write lines without an answer here.")]


@batch_app.command("run")
def batch_run(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSON Lines, one request a line.")],
    output: Output = None,
    errors: Errors = None,
    endpoint: Annotated[str | None, typer.Option(help="Where requests go; else the first line's url.")] = None,
    window: Annotated[str, typer.Option(help="How long it may take: 12h to 7d.")] = "24h",
    detach: Annotated[bool, typer.Option("--detach", help="Print the batch's id and don't wait.")] = False,
    as_json: Json = False,
) -> None:
    """Run a file of requests on the running server, and write the answers in the order of the file."""
    from perilune.cli import batch as verb

    if detach and output is not None:
        raise typer.BadParameter("--detach doesn't wait for answers; fetch them later with `perilune batch fetch`.")
    options = verb.Options(output, errors, endpoint, window, detach, as_json)
    raise typer.Exit(verb.run(ctx.obj.settings(), file, options))


@batch_app.command("fetch")
def batch_fetch(
    ctx: typer.Context, batch: BatchId, output: Output = None, errors: Errors = None, as_json: Json = False
) -> None:
    """Wait for a batch and write its answers."""
    from perilune.cli import batch as verb

    options = verb.Options(output, errors, as_json=as_json)
    raise typer.Exit(verb.fetch(ctx.obj.settings(), batch, options))


@batch_app.command("list")
def batch_list(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Most batches.")] = 20,
    as_json: Json = False,
) -> None:
    """List batches, the newest first."""
    from perilune.cli import batch as verb

    verb.show(ctx.obj.settings(), limit, as_json)


@batch_app.command("cancel")
def batch_cancel(ctx: typer.Context, batch: BatchId, as_json: Json = False) -> None:
    """Stop a batch. Lines that were done keep their answers."""
    from perilune.cli import batch as verb

    verb.cancel(ctx.obj.settings(), batch, as_json)
