"""Limits of API keys: reserve on admission, settle on use (spec S3, E5).

Knows keys, counts and two clocks; doesn't know HTTP, queues or engines. Rates (requests and tokens a minute,
tokens a second of streams) are token buckets on the monotonic clock. Quotas (tokens a day, cost a month) are
counted by UTC day on the wall clock, in memory and behind it in the database: what a `kill -9` can lose is the last
second's.

A refusal is one of two here, told apart by their codes: a *rate* (try again in a moment; says when) and a *quota*
(trying again is in vain until the day or month ends, or an administrator raises it). The third, overload, is
`admission.Admission`'s.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from perilune.core import Balance, KeyLimits, RateState, RawPrompt, Request, Usage
from perilune.errors import InvalidRequest, QuotaExceeded, RateLimited
from perilune.memory.usage import Used, day_of
from perilune.service.backends.health import estimated_tokens
from perilune.telemetry import Telemetry

ANSWER_TOKENS = 256
"""Reserved for an answer whose length the request doesn't bound."""

WITHOUT_KEY = "local"
"""What callers without a key are counted as."""

FLUSH_S = 1.0
_MINUTE_S = 60.0
_DAY_S = 86_400.0
_LEAST_BURST_TOKENS = 8.0

_log = logging.getLogger(__name__)


class UsageRows(Protocol):
    """`memory.usage.UsageStore`. Blocks."""

    def add(self, used: dict[tuple[str, str], Used]) -> None: ...
    def day(self, key_id: str, day: str) -> Used: ...
    def month(self, key_id: str, month: str) -> Used: ...


@dataclass(slots=True)
class Bucket:
    """`limit` units a period, refilled evenly; the level may go below zero when more was used than reserved."""

    limit: float
    per_s: float
    level: float
    at_s: float

    @classmethod
    def a_minute(cls, limit: float, now_s: float) -> Bucket:
        return cls(limit, limit / _MINUTE_S, limit, now_s)

    def refill(self, now_s: float) -> None:
        """A clock that went back refills nothing and takes nothing."""
        self.level = min(self.limit, self.level + max(0.0, now_s - self.at_s) * self.per_s)
        self.at_s = now_s

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there; 0 where it is."""
        return max(0.0, amount - self.level) / self.per_s

    @property
    def full_in_s(self) -> float:
        return max(0.0, self.limit - self.level) / self.per_s


@dataclass(slots=True)
class _Account:
    """One key's state. `day` and `month` name what `today` and `spent` were read for."""

    requests: Bucket | None = None
    tokens: Bucket | None = None
    stream: Bucket | None = None
    running: int = 0
    day: str = ""
    today: Used = field(default_factory=Used)
    month: str = ""
    spent: float = 0.0
    reserved_tokens: int = 0
    reserved_cost: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Reservation:
    """What one request holds of its key's limits. `settle` once; what wasn't settled is given back."""

    def __init__(
        self, ledger: Ledger, key_id: str, account: _Account, model: str, wanted: Usage, cost: float
    ) -> None:
        self._ledger = ledger
        self._key_id = key_id
        self._account = account
        self._model = model
        self._prompt = wanted.prompt_tokens
        self._tokens = wanted.prompt_tokens + wanted.completion_tokens
        self._cost = cost
        self._settled = False
        self.state: RateState | None = None

    def settle(self, usage: Usage, cost: float) -> None:
        """What it came to."""
        if not self._settled:
            self._settled = True
            self._release(usage.prompt_tokens + usage.completion_tokens)
            self._ledger.use(
                self._key_id, self._account, Used(1, usage.prompt_tokens, usage.completion_tokens, cost)
            )

    def settle_left(self, pieces: int) -> None:
        """The answer was left or broke off after so many pieces of text; nothing, where it was settled."""
        used = Usage(self._prompt, pieces, 0)
        self.settle(used, self._ledger.price(self._model, used))

    def give_back(self) -> None:
        """Nothing was used."""
        if not self._settled:
            self._settled = True
            self._release(0)

    async def pace(self) -> None:
        """Wait until the key's streams may carry one more token."""
        bucket = self._account.stream
        if bucket is not None:
            bucket.refill(self._ledger.clock())
            bucket.level -= 1
            if bucket.level < 0:
                await asyncio.sleep(-bucket.level / bucket.per_s)

    def _release(self, used_tokens: int) -> None:
        account = self._account
        account.reserved_tokens -= self._tokens
        account.reserved_cost -= self._cost
        if account.tokens is not None:
            account.tokens.refill(self._ledger.clock())
            account.tokens.level = min(account.tokens.limit, account.tokens.level + self._tokens - used_tokens)


class Ledger:
    """Accounts of every key that was seen. Used from the event loop; `start` before, `close` after.

    `defaults` are the limits of keys without their own, and of callers without a key. `cost_of` prices a usage of a
    model before it is known who answers: the dearest.
    """

    def __init__(
        self,
        rows: UsageRows,
        defaults: KeyLimits,
        cost_of: Callable[[str, Usage], float],
        clock: Callable[[], float],
        now: Callable[[], float],
        telemetry: Telemetry,
    ) -> None:
        self._rows = rows
        self._defaults = defaults
        self.price = cost_of
        self.clock = clock
        self._now = now
        self._telemetry = telemetry
        self._accounts: dict[str, _Account] = {}
        self._unsaved: dict[tuple[str, str], Used] = {}
        self._saving: asyncio.Task[None] | None = None
        self._save_lock = asyncio.Lock()

    def start(self) -> None:
        if self._saving is None:
            self._saving = asyncio.create_task(self._save_for_ever(), name="save usage")

    async def close(self) -> None:
        """Save what is left."""
        task, self._saving = self._saving, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        await self.save()

    # ------------------------------------------------------------------------------------------ requests

    @asynccontextmanager
    async def reserve(self, request: Request) -> AsyncIterator[Reservation]:
        """Hold what the request may need until it has ended.

        Raises `RateLimited`, `QuotaExceeded`, and `InvalidRequest` for one that no waiting would let in.
        """
        limits = (request.limits or KeyLimits()).over(self._defaults)
        key_id = request.key_id or WITHOUT_KEY
        account = self._accounts.setdefault(key_id, _Account())
        prompt = math.ceil(sum(estimated_tokens(message.text) for message in request.messages))
        prompt += _raw_tokens(request.raw)
        answer = (request.sampling.max_tokens or ANSWER_TOKENS) * request.n
        wanted = Usage(prompt, answer, 0)
        cost = self.price(request.model, wanted)
        await self._catch_up(key_id, account, limits)
        self._fit(account, limits)
        self._check(account, limits, prompt + answer, cost)
        self._take(account, prompt + answer, cost)
        reservation = Reservation(self, key_id, account, request.model, wanted, cost)
        reservation.state = self._state(account)
        try:
            yield reservation
        finally:
            account.running -= 1
            reservation.give_back()

    def _check(self, account: _Account, limits: KeyLimits, tokens: int, cost: float) -> None:
        """Raise for the first limit that is reached: those that no waiting helps first."""
        if account.tokens is not None and tokens > account.tokens.limit:
            raise InvalidRequest(
                f"The request may take {tokens:,} tokens, and this key {limits.tokens_per_minute:,} a minute.",
                hint="Ask for fewer tokens with max_tokens, send less, or ask an administrator for a higher limit.",
                param="max_tokens",
            )
        self._check_quotas(account, limits, tokens, cost)
        if limits.concurrency is not None and account.running >= limits.concurrency:
            raise self._rate(account, "requests", f"{account.running} requests of this key run already", 1.0)
        for what, bucket, amount in (
            ("requests", account.requests, 1.0),
            ("tokens", account.tokens, float(tokens)),
        ):
            if bucket is not None and (wait_s := bucket.wait_s(amount)) > 0:
                raise self._rate(account, what, f"this key's {bucket.limit:,.0f} {what} a minute are used", wait_s)

    def _check_quotas(self, account: _Account, limits: KeyLimits, tokens: int, cost: float) -> None:
        most, now = limits.tokens_per_day, self._now()
        if most is not None and account.today.tokens + account.reserved_tokens + tokens > most:
            left = max(0, most - account.today.tokens - account.reserved_tokens)
            self._telemetry.count("requests_refused", reason="quota")
            raise QuotaExceeded(
                f"This key may use {most:,} tokens a day; {left:,} are left, and the request may take {tokens:,}.",
                hint="Ask for fewer tokens, wait for the next UTC day, or ask an administrator for more.",
                retry_after_s=_DAY_S - now % _DAY_S,
            )
        budget = limits.budget
        spent = account.spent + account.reserved_cost
        if budget is not None and (spent + cost > budget or spent >= budget):
            self._telemetry.count("requests_refused", reason="budget")
            raise QuotaExceeded(
                f"This key's budget for the month is {budget:g}; {spent:g} is spent or reserved, and the request "
                f"may cost {cost:g}.",
                hint="Use a cheaper model, or ask an administrator for more.",
            )

    def _rate(self, account: _Account, what: str, why: str, wait_s: float) -> RateLimited:
        self._telemetry.count("requests_refused", reason=f"rate_{what}")
        return RateLimited(
            f"Too many {what}: {why}.",
            hint=f"Try again in {wait_s:.1f} s.",
            kind=what,
            retry_after_s=wait_s,
            rates=self._state(account),
        )

    @staticmethod
    def _take(account: _Account, tokens: int, cost: float) -> None:
        account.running += 1
        account.reserved_tokens += tokens
        account.reserved_cost += cost
        if account.requests is not None:
            account.requests.level -= 1
        if account.tokens is not None:
            account.tokens.level -= tokens

    def _fit(self, account: _Account, limits: KeyLimits) -> None:
        """Buckets of the limits as they are now: an administrator may have changed them."""
        now_s = self.clock()
        account.requests = _fitted(account.requests, limits.requests_per_minute, now_s)
        account.tokens = _fitted(account.tokens, limits.tokens_per_minute, now_s)
        rate = limits.stream_tokens_per_s
        if rate is None:
            account.stream = None
        elif account.stream is None or account.stream.per_s != rate:
            burst = max(rate, _LEAST_BURST_TOKENS)
            account.stream = Bucket(burst, rate, burst, now_s)

    @staticmethod
    def _state(account: _Account) -> RateState | None:
        requests, tokens = account.requests, account.tokens
        if requests is None and tokens is None:
            return None
        return RateState(
            limit_requests=None if requests is None else int(requests.limit),
            remaining_requests=None if requests is None else max(0, int(requests.level)),
            reset_requests_s=None if requests is None else requests.full_in_s,
            limit_tokens=None if tokens is None else int(tokens.limit),
            remaining_tokens=None if tokens is None else max(0, int(tokens.level)),
            reset_tokens_s=None if tokens is None else tokens.full_in_s,
        )

    # --------------------------------------------------------------------------------------------- usage

    def use(self, key_id: str, account: _Account, used: Used) -> None:
        """Count what was used, today by the wall clock."""
        day = day_of(self._now())
        if account.day == day:
            account.today += used
        if account.month == day[:7]:
            account.spent += used.cost
        self._unsaved[key_id, day] = self._unsaved.get((key_id, day), Used()) + used

    async def balance(self, key_id: str | None, limits: KeyLimits | None) -> Balance:
        """What a key may still spend in this month."""
        found, key_id = (limits or KeyLimits()).over(self._defaults), key_id or WITHOUT_KEY
        account = self._accounts.setdefault(key_id, _Account())
        if found.budget is None:
            return Balance(None, 0.0)
        await self._catch_up(key_id, account, found)
        return Balance(found.budget, account.spent + account.reserved_cost)

    async def _catch_up(self, key_id: str, account: _Account, limits: KeyLimits) -> None:
        """Read what was used before, once a day, where a quota depends on it."""
        day = day_of(self._now())
        if limits.tokens_per_day is None and limits.budget is None:
            return
        if account.day == day and account.month == day[:7]:
            return
        async with account.lock:
            if account.day == day and account.month == day[:7]:
                return
            await self.save()
            today = await asyncio.to_thread(self._rows.day, key_id, day)
            month = await asyncio.to_thread(self._rows.month, key_id, day[:7])
            unsaved = {at: used for (key, at), used in self._unsaved.items() if key == key_id}
            account.today = today + unsaved.get(day, Used())
            account.spent = month.cost + sum(used.cost for at, used in unsaved.items() if at.startswith(day[:7]))
            account.day, account.month = day, day[:7]

    async def save(self) -> None:
        """Write what isn't in the database yet; what can't be written is kept for the next time."""
        async with self._save_lock:
            unsaved, self._unsaved = self._unsaved, {}
            if not unsaved:
                return
            try:
                await asyncio.to_thread(self._rows.add, unsaved)
            except Exception as error:  # a full disk, a locked database: an answer isn't refused for it
                for at, used in unsaved.items():
                    self._unsaved[at] = self._unsaved.get(at, Used()) + used
                self._telemetry.count("usage_unsaved")
                _log.warning("usage could not be saved", extra={"fields": {"exception": type(error).__name__}})

    async def _save_for_ever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await asyncio.shield(self.save())


def _fitted(bucket: Bucket | None, limit: int | None, now_s: float) -> Bucket | None:
    if limit is None:
        return None
    if bucket is None or bucket.limit != limit:
        return Bucket.a_minute(limit, now_s)
    bucket.refill(now_s)
    return bucket


def _raw_tokens(raw: RawPrompt | None) -> int:
    if raw is None:
        return 0
    return len(raw.token_ids) if raw.text is None else math.ceil(estimated_tokens(raw.text))
