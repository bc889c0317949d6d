"""The options of `perilune capacity` and `cost`; the work is `cli/capacity.py`'s and `cli/cost.py`'s, loaded when
one runs."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Annotated

import typer


def _finite(value: float | None) -> float | None:
    """For options: `nan` passes every bound, and `inf` most."""
    if value is not None and not isfinite(value):
        raise typer.BadParameter("It must be a finite number.")
    return value


Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def capacity(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Mooncake, Azure or own request logs.")],
    requests_per_second: Annotated[
        float | None,
        typer.Option(
            callback=_finite, min=0.001, max=1e6, help="The load to be served. None: the trace's own rate."
        ),
    ] = None,
    attainment: Annotated[
        float,
        typer.Option(
            callback=_finite, min=0.01, max=1, help="Share of P0, and of P1, whose first token is in time."
        ),
    ] = 0.95,
    machine: Annotated[
        str, typer.Option(help="What is simulated: a100-8b, or a file of fitted constants.")
    ] = "a100-8b",
    policy: Annotated[str, typer.Option(help="fcfs, edf, static, deadline or deadline-refuse.")] = "deadline",
    seeds: Annotated[int, typer.Option(min=3, help="Parts of the trace to play, each drawn by a seed.")] = 3,
    minutes: Annotated[
        float, typer.Option(callback=_finite, min=0.1, max=1440, help="Least simulated minutes of a run.")
    ] = 5.0,
    p0: Annotated[
        float, typer.Option(callback=_finite, min=0.01, help="Seconds to interactive requests' first tokens.")
    ] = 3.0,
    p1: Annotated[
        float, typer.Option(callback=_finite, min=0.01, help="And to those of prompts over 8K tokens.")
    ] = 30.0,
    time_limit: Annotated[
        float, typer.Option(callback=_finite, min=1, help="Seconds after which the search ends with what it has.")
    ] = 120.0,
    as_json: Json = False,
) -> None:
    """How much of a trace's load one replica holds, and how many a load needs. All of it is simulated."""
    from perilune.cli import capacity as verb

    options = verb.Options(
        requests_per_second, attainment, machine, policy, seeds, minutes, p0, p1, time_limit, as_json
    )
    verb.run(traces, options)


def cost(
    ctx: typer.Context,
    since: Annotated[str | None, typer.Option(help="Only this UTC day and later (2026-03-01).")] = None,
    by: Annotated[str, typer.Option(help="One row for each key, day or month.")] = "key",
    prompt_cost: Annotated[
        float | None,
        typer.Option(
            callback=_finite, min=0, help="Also what it would cost at this price of a million prompt tokens."
        ),
    ] = None,
    completion_cost: Annotated[
        float | None, typer.Option(callback=_finite, min=0, help="The same for a million completion tokens.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What was used, and what it cost by the backends' prices. Read from the home folder, without a server."""
    from perilune.cli import cost as verb

    prices = verb.prices_of(prompt_cost, completion_cost)
    verb.run(ctx.obj.settings(), verb.Options(by, since, prices, as_json))
