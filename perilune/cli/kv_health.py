"""`perilune kv health`: where decode time and KV's memory go, what is wrong, and which setting to change.

Asks the running server; where none runs, it asks a model loaded here about a long text, over tiers and with
attention debug on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from perilune.cli.client import Client, LocalClient, Question, connect, find_server
from perilune.cli.console import StatusLine, print_json, table
from perilune.config import Settings
from perilune.core import ContextPolicy, Message, TextPart
from perilune.errors import InvalidRequest
from perilune.runtime.memory import human_bytes

PROBE_NEW_TOKENS = 48
_PROBE_DEADLINE_S = 3600.0
_MOST_CHARS_A_TOKEN = 16
"""More of a text than this needn't be tokenised to find its first tokens."""

_PARTS = (
    ("local", "local_attn", "sinks, the newest tokens"),
    ("sparse", "sparse_attn", "index, and the units chosen"),
    ("summary", "summary_attn", "means of the units not chosen"),
    ("KV", "kv_cache", "closing, moving, waiting for disk"),
    ("other", "other", "weights, sampling"),
)


@dataclass(frozen=True, slots=True)
class Options:
    """`debug`: switch the server's attention debug, None leaves it. `steps`: so many steps in full."""

    debug: bool | None
    steps: int
    tokens: int
    texts: tuple[Path, ...]
    as_json: bool


def run(settings: Settings, options: Options, model_given: bool) -> None:
    """Print the health view. Raises what finding a server or loading a model raises, and `Forbidden` without an
    admin's key."""
    told = asyncio.run(_told(settings, options, model_given))
    if options.as_json:
        print_json(told)
    else:
        show(told)


async def _told(settings: Settings, options: Options, model_given: bool) -> dict[str, Any]:
    if find_server(settings.home) is not None:
        client = await connect(settings, model_given)
        try:
            if options.debug is not None:
                await client.debug_attention(options.debug)
            return await client.kv_health(options.steps)
        finally:
            await client.close()
    if options.debug is not None:
        raise InvalidRequest("No server runs whose attention_debug could be switched.", hint="Leave out --debug.")
    return await _probe(settings, options)


async def _probe(settings: Settings, options: Options) -> dict[str, Any]:
    """Ask one long question of a model loaded here, whose KV is kept in tiers whatever the policy."""
    from perilune.runtime.evaluate.text import read_text

    text = _beginning(settings, read_text(options.texts).text, options.tokens)
    kv_cache = settings.kv_cache.model_copy(update={"policy": "tiered", "tenants": {}})
    attention = settings.attention.model_copy(update={"debug": True})
    probed = settings.model_copy(update={"kv_cache": kv_cache, "attention": attention})
    status = StatusLine(quiet=options.as_json)
    status.update("loading", settings.model.path)
    client = await LocalClient.start(probed)
    try:
        status.update("probing", f"a text of {options.tokens:,} tokens")
        await _ask(client, text)
        return await client.kv_health(options.steps)
    finally:
        status.clear()
        await client.close()


def _beginning(settings: Settings, text: str, tokens: int) -> str:
    """The first `tokens` of a text, as the model counts."""
    from perilune.runtime.checkpoint import open_checkpoint
    from perilune.runtime.hub.pull import resolve
    from perilune.runtime.tokenizer import load_tokenizer

    checkpoint = open_checkpoint(resolve(settings.model.path, settings.home).path)
    try:
        tokenizer = load_tokenizer(checkpoint)
    finally:
        checkpoint.close()
    return tokenizer.decode(tokenizer.encode(text[: _MOST_CHARS_A_TOKEN * tokens])[:tokens])


async def _ask(client: Client, text: str) -> None:
    message = Message("user", (TextPart(f"{text}\n\nWhat is this text about? Answer at length."),))
    question = Question((message,), ContextPolicy.FULL, _PROBE_DEADLINE_S, PROBE_NEW_TOKENS)
    async with aclosing(cast("Any", client.ask(question))) as events:
        async for _ in events:
            pass


# ------------------------------------------------------------------------------------------------------- tables


def show(told: dict[str, Any]) -> None:
    """Memory, counts, time, findings."""
    _show_memory(told)
    print()
    _show_counts(told)
    print()
    _show_attention(told["attention_debug"])
    print()
    findings = told["findings"]
    if not findings:
        print("Nothing is wrong.")
    for finding in findings:
        print(f"{finding['setting']}: {finding['cause']}")
        print(f"    {finding['advice']}")


def _show_memory(told: dict[str, Any]) -> None:
    kv = told["kv"]
    rows = [
        (name, human_bytes(kv[f"{key}_bytes"]), where)
        for name, key, where in (
            ("HOT", "hot", "full precision, RAM"),
            ("WARM", "warm", "INT8, RAM"),
            ("COLD", "cold", "INT8, disk"),
            ("summaries", "summary", "RAM"),
        )
    ]
    table(("TIER", "BYTES", "IS"), rows)
    print(
        f"pressure {told['pressure']}: KV in use takes {kv['limit_share']:.1%} of "
        f"{human_bytes(kv['limit_bytes'])}; "
        f"{human_bytes(kv['idle_bytes'])} are cached for later; fragmentation {kv['fragmentation']:.0%}"
    )
    if kv["warm_compression_ratio"] is not None:
        print(
            f"WARM is {kv['warm_compression_ratio']:.0%} smaller than fp32, {kv['bf16_over_warm']:.2f} times "
            "smaller than bf16, summaries counted"
        )


def _show_counts(told: dict[str, Any]) -> None:
    counts = told["counts"]
    found = counts["hit_tokens"] + counts["rehydrated_tokens"]
    cold = counts["cold_steps_hit"] + counts["cold_steps_missed"]
    print(
        f"prompt tokens: {counts['hit_tokens']:,} found in RAM, {counts['rehydrated_tokens']:,} brought back from "
        f"disk, {counts['computed_tokens']:,} computed ({_share(found, found + counts['computed_tokens'])} reused)"
    )
    print(
        f"segments: {counts['segments_closed']:,} closed, {counts['demoted']:,} moved to disk, "
        f"{counts['promoted']:,} back, {counts['move_failures']:,} failed"
    )
    print(
        f"steps over COLD: {cold:,}, of which {_share(counts['cold_steps_hit'], cold)} read nothing from disk; "
        f"{counts['cold_stall_s']:.2f} s waited"
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _show_attention(debug: dict[str, Any]) -> None:
    summary = debug["summary"]
    if summary is None:
        state = "on, but no step over closed segments ran yet" if debug["on"] else "off; --debug switches it on"
        print(f"attention_debug is {state}.")
        return
    print(
        f"{summary['steps']} decode steps at about {summary['context_tokens']:,.0f} tokens, "
        f"{summary['step_ms']:.1f} ms each{'' if debug['on'] else ' (attention_debug is off now)'}"
    )
    table(
        ("PART", "MS A STEP", "SHARE", "IS"),
        [
            (name, f"{summary[f'{key}_ms']:.2f}", f"{summary[f'{key}_share']:.0%}", what)
            for name, key, what in _PARTS
        ],
    )
    if summary["topk_units"] is not None:
        change = summary["topk_change"]
        print(
            f"a head chooses {summary['topk_units']:.0f} units ({change or 0:.0%} more or fewer each step); they "
            f"hold {summary['sparse_attn_hit_rate']:.0%} of the far attention"
        )
    for step in debug["steps"]:
        _show_step(step)


def _show_step(step: dict[str, Any]) -> None:
    print()
    about = f"{step['rows']} sequences, {step['context_tokens']:,} tokens, {step['step_ms']:.1f} ms"
    print(f"step {step['number']}: {about}")
    columns = ("LAYER", "LOCAL", "SPARSE", "SUMMARY", "KV", "OTHER", "HIT RATE", "UNITS")
    table(columns, [_layer_row(index, layer) for index, layer in enumerate(step["layers"])])


def _layer_row(index: int, layer: dict[str, Any]) -> Sequence[str]:
    times = (f"{layer[f'{key}_ms']:.3f}" for _, key, _ in _PARTS)
    rate, top = layer["sparse_attn_hit_rate"], layer["topk_dynamics"]
    return (
        str(index),
        *times,
        "-" if rate is None else f"{rate:.0%}",
        "-" if top is None else f"{top['units']:.1f}",
    )
