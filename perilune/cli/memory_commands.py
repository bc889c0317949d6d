"""The options of `perilune memory` and `perilune sessions`; the work is `cli/memory.py`'s, loaded when a verb
runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

memory_app = typer.Typer(help="What is remembered of you, of conversations and documents.", no_args_is_help=True)
sessions_app = typer.Typer(help="Kept conversations.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
Session = Annotated[str | None, typer.Option("--session", help="A session's id.")]
File = Annotated[str | None, typer.Option("--file", help="A file's id, as `perilune ingest` prints it.")]


@memory_app.command("search")
def memory_search(
    ctx: typer.Context,
    text: Annotated[str, typer.Argument(help="What to look for.")],
    sessions: Annotated[
        list[str] | None, typer.Option("--session", help="Only this session; again for more.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Most results.")] = 10,
    since: Annotated[str | None, typer.Option(help="Turns of this day or later (2026-03-01).")] = None,
    until: Annotated[str | None, typer.Option(help="Turns of this day or earlier.")] = None,
    as_json: Json = False,
) -> None:
    """Search sessions and documents of the running server."""
    from perilune.cli import memory as verb

    verb.search(ctx.obj.settings(), text, sessions or (), limit, (since, until), as_json)


@memory_app.command("show")
def memory_show(
    ctx: typer.Context,
    session: Session = None,
    file: File = None,
    history: Annotated[bool, typer.Option("--history", help="Also what was true before.")] = False,
    as_json: Json = False,
) -> None:
    """Show what is known about you; with --session or --file, the summary of that."""
    from perilune.cli import memory as verb

    if session is None and file is None:
        verb.show_profile(ctx.obj.settings(), history, as_json)
    else:
        verb.show_summary(ctx.obj.settings(), verb.source_of(session, file), as_json)


@memory_app.command("edit")
def memory_edit(
    ctx: typer.Context,
    what: Annotated[
        str, typer.Argument(metavar="KEY|PLACE", help="A key of the profile; or a place, as show prints it.")
    ],
    text: Annotated[str, typer.Argument(help='The new value; or the sentence as it should be, "" strikes it out.')],
    session: Session = None,
    file: File = None,
    as_json: Json = False,
) -> None:
    """Set a key of the profile; with --session or --file, correct a sentence of that summary, for good."""
    from perilune.cli import memory as verb

    if session is None and file is None:
        verb.edit_profile(ctx.obj.settings(), what, text, as_json)
    else:
        verb.correct(ctx.obj.settings(), verb.source_of(session, file), what, text, as_json)


@memory_app.command("export")
def memory_export(
    ctx: typer.Context,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here; else to stdout.")] = None,
) -> None:
    """Write everything that is kept about you, as JSON Lines: profile, turns, corrections, list of files."""
    from perilune.cli import memory as verb

    verb.export(ctx.obj.settings(), output)


@memory_app.command("forget")
def memory_forget(
    ctx: typer.Context,
    session: Annotated[
        str | None, typer.Option("--session", help="Delete this session and all made of it.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", help="Erase this key of the profile, with its history.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Erase the whole profile.")] = False,
    everything: Annotated[
        bool,
        typer.Option("--everything", help="Delete all that is kept of you: files, sessions, profile, answers."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete a session: turns, index, summary, facts and KV; or what is known about you; or everything."""
    from perilune.cli import memory as verb

    if (session is not None) + (key is not None) + profile + everything != 1:
        raise typer.BadParameter("Say what to forget: --session ID, --key KEY, --profile or --everything.")
    if everything:
        verb.forget_everything(ctx.obj.settings(), as_json)
    elif session is not None:
        verb.forget(ctx.obj.settings(), session, as_json)
    else:
        verb.forget_profile(ctx.obj.settings(), key, as_json)


@sessions_app.command("ls")
@sessions_app.command("list", hidden=True)
def sessions_ls(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most sessions.")] = 100,
    as_json: Json = False,
) -> None:
    """List sessions of the running server, the newest first."""
    from perilune.cli import memory as verb

    verb.show_sessions(ctx.obj.settings(), limit, as_json)


@sessions_app.command("show")
def sessions_show(
    ctx: typer.Context,
    session: Annotated[str, typer.Argument(help="The session's id.")],
    after: Annotated[int, typer.Option(min=0, help="Begin behind this turn.")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most turns.")] = 100,
    as_json: Json = False,
) -> None:
    """Print what was said in a session."""
    from perilune.cli import memory as verb

    verb.show_session(ctx.obj.settings(), session, after, limit, as_json)


@sessions_app.command("export")
def sessions_export(
    ctx: typer.Context,
    session: Annotated[str, typer.Argument(help="The session's id.")],
    form: Annotated[
        str, typer.Option("--format", help="markdown, to be read; or json, with all that is kept of it.")
    ] = "markdown",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here; else to stdout.")] = None,
) -> None:
    """Write a whole session with its sources to a file or stdout."""
    from perilune.cli import memory as verb

    verb.export_session(ctx.obj.settings(), session, form, output)


@sessions_app.command("rm")
@sessions_app.command("delete", hidden=True)
def sessions_rm(
    ctx: typer.Context, session: Annotated[str, typer.Argument(help="The session's id.")], as_json: Json = False
) -> None:
    """Delete a session, as `perilune memory forget --session` does."""
    from perilune.cli import memory as verb

    verb.forget(ctx.obj.settings(), session, as_json)
