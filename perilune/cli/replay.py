"""`perilune bench replay`: a trace against a running server, open loop: requests go out at their times, whatever
the server does. What it prints was measured.

Knows traces and OpenAI's chat dialect from the client's side; nothing of the server. Prompts are made of words,
about one token each; equal `hash_ids` make equal beginnings, so that what a trace lets be reused can be reused.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from perilune.cli.client import find_server
from perilune.cli.console import print_json, say, table
from perilune.cli.simulate import Options, excerpt
from perilune.core import ServiceClass
from perilune.engine.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest, read_trace
from perilune.errors import Unreachable

_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will no more if out so up said what its about than
into them can only other time new some could these two may first then do any like my now over such
"""
_TIERS = {ServiceClass.P0_INTERACTIVE: "default", ServiceClass.P1_DOCUMENT: "flex", ServiceClass.P2_BATCH: "batch"}


@dataclass(slots=True)
class Replayed:
    """One request, in seconds from when it was due to be sent. `status` 0: no answer came."""

    request: TraceRequest
    status: int = 0
    ttft_s: float | None = None
    total_s: float | None = None
    late_s: float = field(default=0.0)  # sent after it was due: the client's own lag

    @property
    def in_time(self) -> bool:
        due_s = self.request.deadline_s
        return self.ttft_s is not None and (due_s is None or self.ttft_s <= due_s)


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `drain_s`: seconds after the last arrival until what still runs is given up."""

    url: str
    model: str
    key: str | None = None
    drain_s: float = 120.0


def scaled(requests: Sequence[TraceRequest], arrivals: float, lengths: float) -> list[TraceRequest]:
    """Arriving `arrivals` times as fast, with prompts and answers `lengths` times as long."""
    block = max(1, round(MOONCAKE_BLOCK_TOKENS * lengths))
    made = []
    for request in requests:
        prompt = max(8, round(request.prompt_tokens * lengths))
        made.append(
            replace(
                request,
                arrival_s=request.arrival_s / arrivals,
                prompt_tokens=prompt,
                new_tokens=max(1, round(request.new_tokens * lengths)),
                hash_ids=request.hash_ids[: prompt // block],
            )
        )
    return made


def prompt_of(request: TraceRequest, number: int, block_words: int = MOONCAKE_BLOCK_TOKENS) -> str:
    """About as many words as the request has tokens."""
    words: list[str] = []
    for name in request.hash_ids:
        words += random.Random(f"block {name}").choices(_WORDS.split(), k=block_words)
    own = random.Random(f"request {number} {request.arrival_s}")
    words += own.choices(_WORDS.split(), k=max(4, request.prompt_tokens - len(words)))
    return " ".join(words[: max(4, request.prompt_tokens)])


async def replay(target: Target, requests: Sequence[TraceRequest], block_words: int) -> list[Replayed]:
    """Send all of them at their times; returns when each has ended or was given up."""
    found = [Replayed(request) for request in requests]
    headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
    connector = aiohttp.TCPConnector(limit=0)
    bodies = [_body(target, request, number, block_words) for number, request in enumerate(requests)]
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        begun_s = time.perf_counter()
        tasks = []
        for one, body in zip(found, bodies, strict=True):
            due_s = begun_s + one.request.arrival_s
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            one.late_s = time.perf_counter() - due_s
            tasks.append(asyncio.create_task(_send(session, target, body, one, due_s)))
        _, open_ = await asyncio.wait(tasks, timeout=target.drain_s) if tasks else (set(), set())
        for task in open_:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


def _body(target: Target, request: TraceRequest, number: int, block_words: int) -> bytes:
    payload: dict[str, object] = {
        "model": target.model,
        "messages": [{"role": "user", "content": prompt_of(request, number, block_words)}],
        "stream": True,
        "max_tokens": request.new_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "context_policy": "full",
        "service_tier": _TIERS[request.service_class],
    }
    if request.deadline_s is not None:
        payload["deadline_s"] = request.deadline_s
    return json.dumps(payload).encode()


async def _send(session: aiohttp.ClientSession, target: Target, body: bytes, one: Replayed, due_s: float) -> None:
    url = target.url.rstrip("/") + "/chat/completions"
    try:
        async with session.post(url, data=body, headers={"content-type": "application/json"}) as response:
            one.status = response.status
            async for line in response.content:
                if one.ttft_s is None and line.startswith(b"data: ") and _has_text(line):
                    one.ttft_s = time.perf_counter() - due_s
            if response.status == 200:
                one.total_s = time.perf_counter() - due_s
    except aiohttp.ClientError:
        one.status = 0


def _has_text(line: bytes) -> bool:
    try:
        chunk = json.loads(line[6:])
    except ValueError:
        return False
    return any((choice.get("delta") or {}).get("content") for choice in chunk.get("choices", []))


def summary(found: Sequence[Replayed]) -> dict[str, dict[str, float | int | None]]:
    """By class: requests, the share whose first token came in time, the share that ended, quantiles of TTFT (of
    those that had one) and how late the client itself was at most."""
    rows: dict[str, dict[str, float | int | None]] = {}
    for kind in ServiceClass:
        mine = [one for one in found if one.request.service_class is kind]
        if not mine:
            continue
        ttft = sorted(one.ttft_s for one in mine if one.ttft_s is not None)
        rows[f"P{kind.value}"] = {
            "requests": len(mine),
            "in_time": sum(one.in_time for one in mine) / len(mine),
            "done": sum(one.total_s is not None for one in mine) / len(mine),
            "refused": sum(one.status in (429, 503) for one in mine) / len(mine),
            **{f"ttft_p{round(100 * share)}_s": _quantile(ttft, share) for share in (0.5, 0.95, 0.99)},
            "client_late_s": max(one.late_s for one in mine),
        }
    return rows


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def server(home: Path, url: str | None, model: str | None) -> tuple[str, str]:
    """Address and model: what is given, else what the server that runs here has. Raises `Unreachable`."""
    if url is not None and model is not None:
        return url, model
    running = find_server(home)
    if running is None:
        raise Unreachable("No server runs here.", hint="Start `perilune serve`, or give --url and --model.")
    return url or running.url + "/v1", model or running.model


def excerpted(
    trace: Path,
    seed: int,
    minutes: float,
    scale: float,
    lengths: float,
    deadlines_s: tuple[float, float],
    batch_share: float,
) -> list[TraceRequest]:
    """Some minutes of a trace, scaled. Classes go by its own lengths. Raises `InvalidRequest`."""
    options = Options("", (), 1, minutes, scale, *deadlines_s, batch_share, 1, False)
    return scaled(excerpt(read_trace(trace), options, seed), 1.0, lengths)


def run(target: Target, requests: Sequence[TraceRequest], lengths: float, as_json: bool) -> None:
    """Replay requests that are `lengths` times as long as the trace's, and print."""
    block_words = max(1, round(MOONCAKE_BLOCK_TOKENS * lengths))
    rows = summary(asyncio.run(replay(target, requests, block_words)))
    if as_json:
        print_json({"measured": True, "classes": rows})
        return
    say(f"{len(requests)} requests over {requests[-1].arrival_s:.0f} s, measured.")
    columns = list(next(iter(rows.values())))
    table(["class", *columns], [[name, *map(_shown, row.values())] for name, row in rows.items()])


def _shown(value: float | int | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"
