"""Requests of a simulation: read from public traces and from our own log, or made of a trace's lengths.

Knows the file formats. Nothing of engines. Formats:

    Mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids, one for each 512 tokens: equal ids
               are prefixes that can be reused (kvcache-ai/Mooncake, FAST25-release/traces)
    Azure      CSV: TIMESTAMP, ContextTokens, GeneratedTokens (Azure/AzurePublicDataset)
    ours       JSON lines, as the server logs its answers: arrival_s, prompt_tokens, new_tokens, and maybe
               service_class (P0, P1, P2), tenant, deadline_s, ttl_s, hash_ids; the fields of `TraceRequest`
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from perilune.core import BLOCK_TOKENS, DEFAULT_TENANT, ServiceClass
from perilune.errors import InvalidRequest
from perilune.runtime.kv.spec import BlockHash

MOONCAKE_BLOCK_TOKENS = 512
DOCUMENT_TOKENS = 8192
"""Requests of a trace with longer prompts are document work (P1), where it doesn't say."""

_MOST_S = 1e12
"""Of a time, before or after the epoch: 30,000 years."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `hash_ids` name each `MOONCAKE_BLOCK_TOKENS` of its prompt."""

    arrival_s: float
    prompt_tokens: int
    new_tokens: int
    service_class: ServiceClass = ServiceClass.P0_INTERACTIVE
    tenant: str = DEFAULT_TENANT
    deadline_s: float | None = None
    ttl_s: float | None = None
    hash_ids: tuple[int, ...] = ()

    def block_names(self) -> list[BlockHash]:
        """Names of the whole blocks of the prompt, as far as the trace tells them."""
        each = MOONCAKE_BLOCK_TOKENS // BLOCK_TOKENS
        names = [b"%d %d" % (number, index) for number in self.hash_ids for index in range(each)]
        return names[: self.prompt_tokens // BLOCK_TOKENS]


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a file, in order of arrival, the first at 0. Raises `InvalidRequest` for other formats."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            requests = list(_read_csv(file) if first.startswith("TIMESTAMP") else _read_lines(file))
    except OSError as error:
        raise InvalidRequest(f"{path} can't be read: {error.strerror}.", hint="Name a trace file.") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, csv.Error) as error:
        raise InvalidRequest(
            f"{path} is no trace that is known here: {type(error).__name__}: {error}.",
            hint="Give a Mooncake (.jsonl) or Azure (.csv) trace or an own log; docs/scheduling.md has the fields.",
        ) from None
    if not requests:
        raise InvalidRequest(f"{path} has no requests.", hint="Name a trace file.")
    requests.sort(key=lambda request: request.arrival_s)
    begin_s = requests[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - begin_s) for request in requests]


def _read_csv(file: Iterator[str]) -> Iterator[TraceRequest]:
    for row in csv.DictReader(file):
        # Seven digits of a second; Python takes six.
        at, _, fraction = row["TIMESTAMP"].strip().partition(".")
        arrival_s = datetime.fromisoformat(at + "+00:00").timestamp() + float(f"0.{fraction or 0}")
        yield _made(arrival_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _read_lines(file: Iterator[str]) -> Iterator[TraceRequest]:
    for line in file:
        if line.strip():
            row = json.loads(line)
            if row.get("message", "answer") != "answer":  # other lines of the server's log
                continue
            yield _mooncake(row) if "input_length" in row else _own(row)


def _mooncake(row: dict[str, Any]) -> TraceRequest:
    request = _made(row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]))
    return replace(request, hash_ids=tuple(int(number) for number in row.get("hash_ids", ())))


def _own(row: dict[str, Any]) -> TraceRequest:
    request = _made(float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["new_tokens"]))
    named = row.get("service_class")
    return replace(
        request,
        service_class=request.service_class if named is None else ServiceClass(int(str(named).removeprefix("P"))),
        tenant=str(row.get("tenant", DEFAULT_TENANT)),
        deadline_s=_seconds(row, "deadline_s"),
        ttl_s=_seconds(row, "ttl_s"),
        hash_ids=tuple(int(number) for number in row.get("hash_ids", ())),
    )


def _seconds(row: dict[str, Any], name: str) -> float | None:
    found = row.get(name)
    return None if found is None else float(found)


def _made(arrival_s: float, prompt_tokens: int, new_tokens: int) -> TraceRequest:
    if prompt_tokens < 0 or new_tokens < 0:
        raise ValueError("a negative number of tokens")
    if not abs(arrival_s) < _MOST_S:
        raise ValueError("a time that is none")
    long = prompt_tokens > DOCUMENT_TOKENS
    service_class = ServiceClass.P1_DOCUMENT if long else ServiceClass.P0_INTERACTIVE
    return TraceRequest(arrival_s, max(2, prompt_tokens), max(1, new_tokens), service_class)


def at_rate(requests: Sequence[TraceRequest], scale: float) -> list[TraceRequest]:
    """The same requests, arriving `scale` times as fast."""
    return [replace(request, arrival_s=request.arrival_s / scale) for request in requests]
