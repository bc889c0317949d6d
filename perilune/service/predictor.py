"""Learns an engine's speeds from its steps and loads, and keeps them between runs.

Implements `engine.observe.EngineObserver`; doesn't know requests or plans. Rates are stored per model fingerprint,
so that the first prediction of a new process is already a measured one. Thread-safe: observations come from the
engine's threads, reads from the event loop.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from perilune.engine.observe import LoadObservation, StepObservation
from perilune.service.calibration import Calibration
from perilune.service.rates import Rates
from perilune.telemetry import Telemetry

_log = logging.getLogger(__name__)

_DECAY = 0.94  # weight that older chunks keep when a new one arrives: about the last 16 chunks count
_SMOOTH = 0.2  # weight of a new reading in the moving averages
_PRIOR_TOKENS = 4.0  # weight of the starting rates, in tokens; keeps the fit defined at a single context length
_MIN_CHUNK_TOKENS = 32  # shorter chunks measure the fixed cost of a step, not the rate
_MIN_SAMPLE_TOKENS = 96  # chunks are added up to this much before they count as one reading
_SHORT_TOKENS = 256  # prompts whose TTFT is mostly overhead
_MAX_OVERHEAD_S = 1.0
_CONTEXT_UNIT = 1000.0  # contexts are fitted in thousands, for the numbers' sake


@dataclass(slots=True)
class _Fit:
    """Weighted least squares of seconds per token over context length, with exponential forgetting."""

    weight: float = 0.0
    k: float = 0.0
    kk: float = 0.0
    y: float = 0.0
    ky: float = 0.0

    def add(self, weight: float, context: float, per_token_s: float) -> None:
        k = context / _CONTEXT_UNIT
        self.weight += weight
        self.k += weight * k
        self.kk += weight * k * k
        self.y += weight * per_token_s
        self.ky += weight * k * per_token_s

    def decay(self) -> None:
        self.weight *= _DECAY
        self.k *= _DECAY
        self.kk *= _DECAY
        self.y *= _DECAY
        self.ky *= _DECAY

    def solve(self) -> tuple[float, float]:
        """(seconds per token, seconds per token and token of context), neither negative."""
        determinant = self.weight * self.kk - self.k * self.k
        slope = (self.weight * self.ky - self.k * self.y) / determinant if determinant > 0 else 0.0
        slope = max(0.0, slope)
        base = (self.y - slope * self.k) / self.weight
        if base <= 0.0:
            base = 0.1 * self.y / self.weight
            slope = max(0.0, (self.y - base * self.weight) / self.k)
        return base, slope / _CONTEXT_UNIT


@dataclass(slots=True)
class _Sample:
    """Chunks added up; `weighted` is the sum of tokens times mean context."""

    tokens: int = 0
    weighted: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, start: int, seconds: float) -> None:
        self.tokens += tokens
        self.weighted += tokens * (start + tokens / 2)
        self.seconds += seconds


class Predictor:
    """The rates of one engine. `path` None keeps them in memory only; `token_bytes` is the KV of one token."""

    def __init__(
        self, path: Path | None, telemetry: Telemetry, token_bytes: int, start: Rates | None = None
    ) -> None:
        self._path = path
        self._token_bytes = token_bytes
        self._telemetry = telemetry
        self._lock = threading.Lock()
        stored = _read(path) if path else None
        self._measured = stored is not None
        self._rates = stored or start or Rates()
        self._prior = self._rates
        self._p90, self._p99 = Calibration(0.90, self._rates.p90), Calibration(0.99, self._rates.p99)
        self._fit = _Fit()
        self._sample = _Sample()

    @property
    def rates(self) -> Rates:
        with self._lock:
            return self._rates

    @property
    def measured(self) -> bool:
        """Whether the prefill rate was ever measured (here or in an earlier run), not guessed."""
        with self._lock:
            return self._measured

    def step(self, observation: StepObservation) -> None:
        """Mixed steps say nothing about either part, so only pure ones are learnt from."""
        if observation.decode_rows == 0:
            self.observe_prefill(observation.prefill_tokens, observation.context_tokens, observation.seconds)
        elif observation.prefill_tokens == 0 and observation.decode_rows == 1:
            self.observe_decode(observation.seconds)

    def load(self, observation: LoadObservation) -> None:
        self.observe_load(observation.size_bytes // self._token_bytes, observation.seconds)

    def observe_prefill(self, tokens: int, start: int, seconds: float) -> None:
        """A chunk of `tokens` after `start` tokens of context, computed in `seconds`."""
        if tokens < _MIN_CHUNK_TOKENS or seconds <= 0:
            return
        with self._lock:
            sample = self._sample
            sample.add(tokens, start, seconds)
            if sample.tokens < _MIN_SAMPLE_TOKENS:
                return
            self._sample = _Sample()
            self._fit.decay()
            self._fit.add(float(sample.tokens), sample.weighted / sample.tokens, sample.seconds / sample.tokens)
            fit = replace(self._fit)
            for context in (0.0, 4 * _CONTEXT_UNIT):
                prior = self._prior.prefill_s_per_token + self._prior.prefill_s_per_token_context * context
                fit.add(_PRIOR_TOKENS, context, prior)
            base, slope = fit.solve()
            self._measured = True
            self._rates = replace(self._rates, prefill_s_per_token=base, prefill_s_per_token_context=slope)
        self._telemetry.observe("prefill_tokens_per_second", tokens / seconds)

    def observe_load(self, tokens: int, seconds: float) -> None:
        """`tokens` came from disk in `seconds`."""
        if tokens < 1 or seconds <= 0:
            return
        with self._lock:
            old = self._rates.load_s_per_token
            new = old + _SMOOTH * (seconds / tokens - old)
            self._rates = replace(self._rates, load_s_per_token=new)

    def observe_decode(self, seconds: float) -> None:
        """One decode step of a lone sequence."""
        if seconds <= 0:
            return
        with self._lock:
            old = self._rates.decode_s
            self._rates = replace(self._rates, decode_s=old + _SMOOTH * (seconds - old))

    def observe_ttft(self, predicted_s: float, measured_s: float, uncached: int) -> None:
        """A request's first token came so long after it was submitted; the error becomes a metric, and the factors
        of quantiles, the planner's margin, follow it.

        Where hardly anything was computed, the difference is what every request pays: the overhead follows it.
        """
        error = abs(measured_s - predicted_s) / max(measured_s, 1e-3)
        with self._lock:
            old = self._rates
            overhead_s = old.overhead_s
            if uncached <= _SHORT_TOKENS:
                overhead_s = min(max(0.0, overhead_s + _SMOOTH * (measured_s - predicted_s)), _MAX_OVERHEAD_S)
            margin = min(0.5, old.error + _SMOOTH * (min(error, 1.0) - old.error))
            ratio = measured_s / max(predicted_s, 1e-6)
            held = self._p90.observe(ratio)
            self._p99.observe(ratio)
            p90, p99 = self._p90.factor, self._p99.factor
            self._rates = replace(old, error=margin, overhead_s=overhead_s, p90=p90, p99=max(p90, p99))
        self._telemetry.observe("ttft_prediction_error_ratio", error)
        self._telemetry.count("ttft_predictions_total", held="yes" if held else "no")

    def save(self) -> None:
        """Write the rates where the next process finds them. Losing them costs a guess, so no fsync."""
        with self._lock:
            if self._path is None or not self._measured:
                return
            text = json.dumps(asdict(self._rates))
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            _log.warning("measured rates were not saved: %s", error.strerror)


def _read(path: Path) -> Rates | None:
    """Rates of an earlier run; None when there are none or the file is damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        rates = Rates(**{key: float(value) for key, value in values.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    sane = rates.prefill_s_per_token > 0 and all(value >= 0 for value in asdict(rates).values())
    return rates if sane else None
