"""What the engine measures, for whoever predicts (spec C2). Plain data and one Protocol; no arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One finished step. `context_tokens` is the mean context that the prefill chunks started from."""

    prefill_tokens: int
    context_tokens: int
    decode_rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadObservation:
    """One finished load from the KV store: bytes that were verified, and the wall time it took."""

    size_bytes: int
    seconds: float


class EngineObserver(Protocol):
    """`step` is called on the engine thread, `load` on an I/O thread; neither may block."""

    def step(self, observation: StepObservation) -> None: ...
    def load(self, observation: LoadObservation) -> None: ...


class NullObserver:
    """Watches nothing."""

    def step(self, observation: StepObservation) -> None: ...
    def load(self, observation: LoadObservation) -> None: ...
