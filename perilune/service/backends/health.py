"""What is known of one backend: whether to ask it now, how fast it was, how its tokens count.

Bookkeeping with an injected clock; knows no sockets and no other backend. Three ways out of service, told apart
because each ends differently: *ejected* (it fails; a probe or time brings it back on trial, and the next failure
sends it out for twice as long), *cooling down* (it said when to come back; nothing ends that early), *denied* (key,
model or address are wrong: a person has to act, so it is tried rarely).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from perilune.service.backends.protocol import SICK, BackendFault, FaultKind
from perilune.service.rates import Rates

_SMOOTH = 0.2  # weight of a new reading in the moving averages
_SHORT_TOKENS = 256  # prompts whose TTFT is mostly overhead
_START_OVERHEAD_S = 0.3
_START_S_PER_TOKEN = 2e-5  # a guess that cuts no prompt: the first answers teach better
_MOST_S_PER_TOKEN = 0.1
_CHARS_PER_TOKEN = 4.0
_FOREIGN_CHARS_PER_TOKEN = 1.5
_LEAST_SCALE, _MOST_SCALE = 0.3, 3.0
_DENIED_S = 60.0
_LIMITED_S = 2.0

_FAILURES: dict[FaultKind, int] = {FaultKind.TIMED_OUT: 1, FaultKind.UNREACHABLE: 1, FaultKind.DENIED: 1}
"""Failures in a row that eject, where it isn't the configured number: a hang costs seconds and nobody there is
certain."""


@dataclass(frozen=True, slots=True)
class HealthRules:
    """`eject_after` failures in a row eject for `eject_s`, doubled each time up to `most_s`."""

    eject_after: int = 3
    eject_s: float = 2.0
    most_s: float = 60.0


def estimated_tokens(text: str) -> float:
    """Tokens of a text without a tokenizer: 4 characters each, 1.5 of scripts that UTF-8 writes in three bytes.

    Takes microseconds for 500 KB; a tokenizer takes a second."""
    if text.isascii():
        return len(text) / _CHARS_PER_TOKEN
    foreign = (len(text.encode("utf-8", "surrogatepass")) - len(text)) / 2
    return (len(text) - foreign) / _CHARS_PER_TOKEN + foreign / _FOREIGN_CHARS_PER_TOKEN


class Health:
    """The state of one backend. `window_tokens` is what it claims."""

    def __init__(self, rules: HealthRules, window_tokens: int, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._clock = clock
        self._failures = 0
        self._ejections = 0
        self._out_until_s = -math.inf
        self._scale = 1.0
        self._overhead_s = _START_OVERHEAD_S
        self._s_per_token = _START_S_PER_TOKEN
        self._error = 0.1
        self.reason: FaultKind | None = None
        """Why it is out of service, or was last."""
        self.window_tokens = window_tokens
        self.in_flight = 0
        self.last_ok_s = -math.inf

    # ---------------------------------------------------------------------------------------- reading

    @property
    def available(self) -> bool:
        return self._clock() >= self._out_until_s

    @property
    def back_in_s(self) -> float:
        """Seconds until it may be asked again; 0 where it may now."""
        return max(0.0, self._out_until_s - self._clock())

    @property
    def cooling(self) -> bool:
        """It is out because it said so, and asking would only be refused again."""
        return not self.available and self.reason in (FaultKind.LIMITED, FaultKind.DENIED)

    def tokens(self, estimate: float) -> int:
        """An estimate in this backend's own tokens, as its usage has taught."""
        return math.ceil(estimate * self._scale)

    def estimate(self, tokens: int) -> float:
        """The other way round."""
        return tokens / self._scale

    @property
    def rates(self) -> Rates:
        """Its speeds, for the planner: a request pays the overhead once and each prompt token a little."""
        return Rates(self._s_per_token, 0.0, 0.0, 0.0, self._overhead_s, self._error)

    def ttft_s(self, tokens: int) -> float:
        return self._overhead_s + self._s_per_token * tokens

    # --------------------------------------------------------------------------------------- learning

    def answered(self, ttft_s: float, tokens: int) -> None:
        """Its first token came `ttft_s` after it was asked about `tokens` of prompt."""
        error = abs(ttft_s - self.ttft_s(tokens)) / max(ttft_s, 1e-3)
        self._error += _SMOOTH * (min(error, 1.0) - self._error)
        if tokens <= _SHORT_TOKENS:
            self._overhead_s += _SMOOTH * (ttft_s - self._overhead_s)
        else:
            per_token_s = min(max(0.0, ttft_s - self._overhead_s) / tokens, _MOST_S_PER_TOKEN)
            self._s_per_token += _SMOOTH * (per_token_s - self._s_per_token)

    def counted(self, estimate: float, prompt_tokens: int) -> None:
        """It counted `prompt_tokens` where `estimate` was expected."""
        if estimate >= 16 and prompt_tokens > 0:
            scale = min(max(prompt_tokens / estimate, _LEAST_SCALE), _MOST_SCALE)
            self._scale += _SMOOTH * (scale - self._scale)

    def too_long(self, tokens: int) -> None:
        """It refused a prompt of `tokens` that its window should hold: believe the refusal."""
        if tokens < self.window_tokens:
            self.window_tokens = max(1, tokens - 1)

    def succeeded(self) -> None:
        """A whole answer came."""
        self._failures = self._ejections = 0
        self.last_ok_s = self._clock()

    def failed(self, fault: BackendFault) -> bool:
        """Note a failure; returns whether it is out of service for it."""
        kind, wait_s = fault.kind, fault.retry_after_s
        if kind is FaultKind.LIMITED or (wait_s is not None and kind is FaultKind.OVERLOADED):
            return self._out(kind, _LIMITED_S if wait_s is None else max(wait_s, 0.1))
        if kind is FaultKind.DENIED:
            return self._out(kind, _DENIED_S)
        if kind not in SICK:
            return False
        self._failures += 1
        if self._failures < _FAILURES.get(kind, self._rules.eject_after) and not self._ejections:
            return False
        out_s = min(self._rules.eject_s * 2**self._ejections, self._rules.most_s)
        self._ejections = min(self._ejections + 1, 16)
        return self._out(kind, out_s)

    def probed(self) -> None:
        """A probe was answered. Who could not be reached is back, on trial; who answered nonsense or was overloaded
        isn't shown to be well by that, and comes back with time."""
        if not self.available and self.reason in (FaultKind.UNREACHABLE, FaultKind.TIMED_OUT):
            self._out_until_s = self._clock()
        self.last_ok_s = self._clock()

    def _out(self, kind: FaultKind, seconds: float) -> bool:
        self.reason = kind
        self._out_until_s = max(self._out_until_s, self._clock() + seconds)
        return True
