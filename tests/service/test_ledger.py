"""Limits of keys: reserve, settle, refuse with the right meaning; clocks that jump; a full disk loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.api.errors import rate_headers, send_error
from perilune.core import (
    Admitted,
    Completed,
    Grammar,
    GrammarKind,
    KeyLimits,
    RateState,
    Request,
    TextDelta,
    Usage,
)
from perilune.errors import EngineBusy, InvalidRequest, PeriluneError, QuotaExceeded, RateLimited
from perilune.memory.store import Store
from perilune.memory.usage import UsageStore, Used, day_of
from perilune.service.ledger import WITHOUT_KEY, Bucket, Ledger
from perilune.telemetry import Telemetry
from tests.service.fakes import NoUsage
from tests.service.harness import Bench, request, running

NOON = 1_764_504_000.0  # 2025-11-30, 12:00 UTC


class Clocks:
    """Both clocks of a ledger."""

    def __init__(self) -> None:
        self.mono = 50.0
        self.wall = NOON

    def ledger(self, rows: NoUsage | None = None, price: float = 0.0, **defaults: float) -> Ledger:
        limits = KeyLimits(**defaults)  # type: ignore[arg-type]
        return Ledger(
            rows or NoUsage(),
            limits,
            lambda model, usage: price * usage.completion_tokens,
            lambda: self.mono,
            lambda: self.wall,
            Telemetry(),
        )


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def ask(tokens: int = 10, key: str | None = "key-1", **limits: float) -> Request:
    asked = request("x" * 40, max_tokens=tokens)  # 10 tokens of prompt, estimated
    return replace(asked, key_id=key, limits=KeyLimits(**limits) if limits else None)  # type: ignore[arg-type]


async def use(ledger: Ledger, asked: Request, prompt: int = 10, answer: int = 10, cost: float = 0.0) -> None:
    async with ledger.reserve(asked) as held:
        held.settle(Usage(prompt, answer, 0), cost)


async def test_without_a_quota_nothing_is_refused_and_all_is_counted(clocks: Clocks) -> None:
    rows = NoUsage()
    ledger = clocks.ledger(rows)
    for _ in range(100):
        await use(ledger, ask(key=None))
    await ledger.close()
    assert rows.rows == {(WITHOUT_KEY, "2025-11-30"): Used(100, 1000, 1000, 0.0)}


async def test_requests_a_minute(clocks: Clocks) -> None:
    ledger = clocks.ledger(requests_per_minute=3)
    for _ in range(3):
        await use(ledger, ask())
    with pytest.raises(RateLimited) as refused:
        await use(ledger, ask())
    assert (refused.value.status, refused.value.code, refused.value.type) == (
        429,
        "rate_limit_exceeded",
        "requests",
    )
    assert refused.value.retry_after_s == pytest.approx(20)
    await use(ledger, ask(key="key-2"))  # each key by itself
    clocks.mono += 20
    await use(ledger, ask())


async def test_tokens_are_reserved_and_settled(clocks: Clocks) -> None:
    ledger = clocks.ledger(tokens_per_minute=100)
    async with ledger.reserve(ask(70)) as held:
        assert held.state is not None
        assert held.state.remaining_tokens == 20
        with pytest.raises(RateLimited) as refused:
            await use(ledger, ask(20))
        assert refused.value.type == "tokens"
        held.settle(Usage(10, 5, 0), 0.0)
    await use(ledger, ask(70), 10, 300)  # more than it asked for: the next one waits for it
    with pytest.raises(RateLimited):
        await use(ledger, ask(1))


async def test_what_was_not_used_is_given_back(clocks: Clocks) -> None:
    ledger = clocks.ledger(tokens_per_minute=100, concurrency=1)
    for _ in range(5):
        with pytest.raises(EngineBusy):
            async with ledger.reserve(ask(80)):
                raise EngineBusy("full")
    await use(ledger, ask(80))


async def test_a_request_that_never_fits_is_no_429(clocks: Clocks) -> None:
    ledger = clocks.ledger(tokens_per_minute=100)
    with pytest.raises(InvalidRequest) as refused:
        await use(ledger, ask(500))
    assert refused.value.param == "max_tokens"


async def test_requests_at_once(clocks: Clocks) -> None:
    ledger = clocks.ledger(concurrency=2)
    async with ledger.reserve(ask()), ledger.reserve(ask()):
        with pytest.raises(RateLimited):
            await use(ledger, ask())
    await use(ledger, ask())


async def test_tokens_a_day_is_a_quota_and_survives_a_restart(clocks: Clocks) -> None:
    rows = NoUsage()
    first = clocks.ledger(rows, tokens_per_day=60)
    await use(first, ask())
    await use(first, ask())
    await first.close()
    ledger = clocks.ledger(rows, tokens_per_day=60)
    await use(ledger, ask())
    with pytest.raises(QuotaExceeded) as refused:
        await use(ledger, ask())
    assert (refused.value.status, refused.value.code) == (429, "insufficient_quota")
    assert refused.value.retry_after_s == pytest.approx(12 * 3600)
    clocks.wall += 12 * 3600
    await use(ledger, ask())


async def test_a_budget_counts_what_runs(clocks: Clocks) -> None:
    ledger = clocks.ledger(price=0.01, budget=0.25)
    async with ledger.reserve(ask(10)), ledger.reserve(ask(10)):
        with pytest.raises(QuotaExceeded):
            await use(ledger, ask(10))
    await use(ledger, ask(10), cost=0.1)
    await use(ledger, ask(10), cost=0.1)
    with pytest.raises(QuotaExceeded) as refused:
        await use(ledger, ask(10))
    assert "0.25" in refused.value.message
    with pytest.raises(QuotaExceeded):
        await use(ledger, ask(10, budget=0.0, key="key-2"))


async def test_the_keys_own_limits_go_before_the_configured_ones(clocks: Clocks) -> None:
    ledger = clocks.ledger(requests_per_minute=1)
    for _ in range(5):
        await use(ledger, ask(requests_per_minute=5))
    with pytest.raises(RateLimited):
        await use(ledger, ask(requests_per_minute=5))
    await use(ledger, ask(requests_per_minute=50))  # raised meanwhile: at once


async def test_the_wall_clock_jumps(clocks: Clocks) -> None:
    """Ahead and back: each day keeps what was used in it, and rates, on the monotonic clock, don't notice."""
    ledger = clocks.ledger(tokens_per_day=40, requests_per_minute=10)
    await use(ledger, ask())
    for jump_s in (400 * 86_400.0, -400 * 86_400.0, -86_400.0 * 20_000, 86_400.0 * 20_000):
        clocks.wall += jump_s
        if clocks.wall == NOON:
            continue
        await use(ledger, ask())
    assert clocks.wall == NOON
    await use(ledger, ask())
    with pytest.raises(QuotaExceeded):
        await use(ledger, ask())


async def test_a_monotonic_clock_that_goes_back_takes_nothing(clocks: Clocks) -> None:
    ledger = clocks.ledger(requests_per_minute=2)
    await use(ledger, ask())
    clocks.mono -= 1000
    await use(ledger, ask())
    with pytest.raises(RateLimited):
        await use(ledger, ask())
    clocks.mono += 30
    await use(ledger, ask())


async def test_a_full_disk_loses_no_usage_and_refuses_nobody(clocks: Clocks) -> None:
    class Full(NoUsage):
        full = True

        def add(self, used: Mapping[tuple[str, str], Used]) -> None:
            if self.full:
                raise OSError("No space left on device")
            super().add(used)

    rows = Full()
    ledger = clocks.ledger(rows, tokens_per_day=60)
    await use(ledger, ask())
    await ledger.save()
    await use(ledger, ask())
    await use(ledger, ask())
    with pytest.raises(QuotaExceeded):
        await use(ledger, ask())
    rows.full = False
    await ledger.close()
    assert rows.rows["key-1", "2025-11-30"].tokens == 60


async def test_streams_of_a_key_share_its_rate() -> None:
    async with running(limits=KeyLimits(stream_tokens_per_s=40.0)) as bench:
        bench.engine.script = lambda spec: "x" * 45
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        await asyncio.gather(bench.ask("one"), bench.ask("two"))
        assert loop.time() - start_s >= (90 - 40) / 40 * 0.9


async def test_through_the_service(clocks: Clocks) -> None:
    rows = NoUsage()
    options = {"usage": rows, "limits": KeyLimits(requests_per_minute=2, tokens_per_day=10_000)}
    async with running(**options, now=lambda: clocks.wall) as bench:
        events = await bench.ask("Hello", max_tokens=20)
        assert isinstance(events[0], Admitted)
        assert events[0].rates.remaining_requests == 1
        done = events[-1]
        assert isinstance(done, Completed)
        await _leave(bench)
        with pytest.raises(RateLimited):
            await bench.ask("Hello")
    used = rows.rows[WITHOUT_KEY, "2025-11-30"]
    assert used.requests == 2
    assert used.completion_tokens == done.usage.completion_tokens + 1  # and the piece that was read


async def test_a_form_is_prepared_within_the_keys_limits() -> None:
    """It may take seconds of a process that all keys share."""
    form = Grammar(GrammarKind.REGEX, "a+")
    async with running(limits=KeyLimits(requests_per_minute=1)) as bench:
        for refusal in (InvalidRequest, RateLimited):  # no forms there; then not asked at all
            with pytest.raises(refusal):
                await bench.ask("Hello", grammar=form)


async def _leave(bench: Bench) -> None:
    events = bench.service.run(request("Hello"))
    async for event in events:
        if isinstance(event, TextDelta):
            break
    await events.aclose()


async def test_a_full_queue_is_the_third_meaning() -> None:
    async with running(limit=0) as bench:
        with pytest.raises(EngineBusy) as refused:
            await bench.ask("Hello")
    assert (refused.value.status, refused.value.code) == (429, "engine_overloaded")


def test_rows_add_up(tmp_path: Path) -> None:
    store = Store(tmp_path)
    rows = UsageStore(store)
    rows.add({("key-1", "2025-11-30"): Used(1, 10, 5, 0.5), ("key-1", "2025-11-01"): Used(1, 1, 1, 0.25)})
    rows.add({("key-1", "2025-11-30"): Used(2, 1, 1, 0.25), ("key-1", "2025-12-01"): Used(9, 9, 9, 9.0)})
    assert rows.day("key-1", "2025-11-30") == Used(3, 11, 6, 0.75)
    assert rows.month("key-1", "2025-11").cost == 1.0
    assert rows.day("key-2", "2025-11-30") == Used()
    assert day_of(0.0) == "1970-01-01"
    store.close()


def test_headers_as_openai_writes_them() -> None:
    told = dict(rate_headers(RateState(60, 59, 1.0, 1000, 10, 361.0)))
    assert told == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"1000",
        b"x-ratelimit-remaining-tokens": b"10",
        b"x-ratelimit-reset-tokens": b"6m1s",
    }
    assert rate_headers(RateState()) == []


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RateLimited("x", retry_after_s=1.2, rates=RateState(1, 0, 0.01)),
         {b"retry-after": b"2", b"x-ratelimit-reset-requests": b"10ms"}),
        (QuotaExceeded("x", retry_after_s=7200.0), {b"retry-after": b"7200", b"x-should-retry": b"false"}),
        (EngineBusy("x"), {b"retry-after": b"2"}),
    ],
)  # fmt: skip
async def test_the_three_meanings_on_the_wire(error: PeriluneError, wanted: dict[bytes, bytes]) -> None:
    sent = []

    async def send(message: object) -> None:
        sent.append(message)

    await send_error(send, error)  # type: ignore[arg-type]
    assert sent[0]["status"] == 429  # type: ignore[index]
    assert wanted.items() <= dict(sent[0]["headers"]).items()  # type: ignore[index]


@given(st.lists(st.tuples(st.floats(-5, 30), st.floats(0, 20)), max_size=60), st.integers(1, 50))
def test_a_bucket_never_gives_more_than_its_rate(steps: list[tuple[float, float]], limit: int) -> None:
    now_s, given_units, ahead_s = 0.0, 0.0, 0.0
    bucket = Bucket.a_minute(limit, now_s)
    for step_s, amount in steps:
        now_s += step_s
        ahead_s += max(0.0, step_s)
        bucket.refill(now_s)
        if bucket.wait_s(amount) == 0:
            bucket.level -= amount
            given_units += amount
    assert given_units <= limit + ahead_s * limit / 60 + 1e-6
    assert bucket.level <= limit
