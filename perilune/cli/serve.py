"""`perilune serve`: the HTTP API over one model, until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import threading
import urllib.parse
import webbrowser

import typer

from perilune.cli.client import RunningServer, announce_server, find_server
from perilune.cli.console import say
from perilune.cli.doctor import warn_if_slow
from perilune.cli.ports import is_free, local_url, owner_of
from perilune.config import Settings
from perilune.errors import ConfigError, Conflict
from perilune.runtime.hub.pull import resolve

_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp32": "fp32", "float32": "fp32", "float": "fp32"}


def dtype_of(name: str | None) -> str | None:
    """vLLM's names for what we compute in. Raises `ConfigError` for what we don't."""
    if name in (None, "auto"):
        return None
    if name not in _DTYPES:
        raise ConfigError(f"--dtype {name} isn't supported.", hint="Use bf16 or fp32.", param="model.dtype")
    return _DTYPES[name]


def run(settings: Settings, max_model_len: int | None, open_page: bool = False) -> None:
    """Serve until SIGINT or SIGTERM. Raises `Conflict` before anything is loaded when that can't work."""
    check_start(settings, max_model_len)
    code = asyncio.run(_serve(settings, open_page))
    if code:
        raise typer.Exit(code)


def check_start(settings: Settings, max_model_len: int | None) -> None:
    """What can be known before loading: the model, its window, the port, another server of this home."""
    card = resolve(settings.model.path, settings.home).card
    window = card.window_tokens
    if max_model_len is not None and window is not None:
        if max_model_len > window:
            raise ConfigError(
                f"--max-model-len {max_model_len} is more than the {window:,} tokens {card.name} was trained on.",
                hint="Leave it out; context scaling isn't available yet.",
            )
        if max_model_len < window:
            say(f"note: KV is allocated as it is needed; the window stays {window:,} tokens.")
    other = find_server(settings.home)
    if other is not None:
        raise Conflict(
            f"A server of {settings.home} runs already at {other.url} (process {other.pid}).",
            hint=f"Use it, stop it with `kill {other.pid}`, or choose another folder with --home.",
        )
    check_port(settings.server.host, settings.server.port)


def check_port(host: str, port: int) -> None:
    """Raises `Conflict` naming the process that has the port."""
    if is_free(host, port):
        return
    owner = owner_of(port)
    who = f"is used by {owner.name} (process {owner.pid})" if owner else "can't be bound"
    stop = f", or stop that process with `kill {owner.pid}`" if owner else ""
    raise Conflict(
        f"Port {port} on {host} {who}.",
        hint=f"Run `perilune serve --port {port + 1 if port < 65535 else 0}`{stop}.",
        param="server.port",
    )


async def _serve(settings: Settings, open_page: bool = False) -> int:
    from perilune.api.app import create_app, serve
    from perilune.build import build
    from perilune.cli.heap import limit_arenas, trim_at_rest
    from perilune.ops.logging import configure

    configure()
    limit_arenas()
    say(f"loading {settings.model.path} …")
    app = build(settings, indexed=True)
    announced = None
    trimming = asyncio.create_task(trim_at_rest())
    try:
        warn_if_slow(settings, app.kernels)
        await app.start()
        model = (await app.service.models())[0]

        def ready(url: str) -> None:
            nonlocal announced
            local = local_url(settings.server.host, urllib.parse.urlsplit(url).port or 0)
            announced = announce_server(settings.home, RunningServer(local, os.getpid(), model.model_id))
            if settings.server.web:
                say(f"Open {local}/ in a browser. Programs use {url}/v1.")
            else:
                say(f"Programs use {url}/v1.")
            say(f"{model.model_id} answers, with a window of {model.max_context_tokens:,} tokens. Ctrl-C stops.")
            if open_page and settings.server.web:
                threading.Thread(target=webbrowser.open, args=(f"{local}/",), daemon=True).start()

        web = create_app(app.service, settings, telemetry=app.telemetry, metrics=app.metrics)
        return await serve(web, app.service, settings, ready)
    finally:
        trimming.cancel()
        if announced is not None:
            announced.unlink(missing_ok=True)
        await app.close()
