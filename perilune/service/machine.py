"""What runs here and how well it fits, in plain words: for the page's first run and for people who ask.

Knows the loaded model, the measured rates and the system; `checks` are those of `perilune doctor`. Everything is
read when it is asked for, in milliseconds, from any thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from perilune import __version__
from perilune.config import Settings
from perilune.runtime.memory import free_memory_bytes, human_bytes
from perilune.service.checks import BASE_BYTES, Check, disk_check, kernels_check
from perilune.service.model import ServedModel
from perilune.service.predictor import Predictor

REFERENCE = "PyTorch reference"
Fit = Literal["ok", "tight"]


@dataclass(frozen=True, slots=True)
class LoadedFacts:
    """What is known once a model is loaded: `trained_tokens` is its own window, `kv_tokens` how many its KV in RAM
    holds."""

    parameters: int
    trained_tokens: int
    kv_bytes: int
    kv_tokens: int
    kernels: str
    threads: int


class Machine:
    """`view` is what GET /v1/machine shows."""

    def __init__(
        self,
        settings: Settings,
        model: ServedModel,
        facts: LoadedFacts,
        predictor: Predictor,
        free_bytes: Callable[[], int] = free_memory_bytes,
    ) -> None:
        self._settings = settings
        self._model = model
        self._facts = facts
        self._predictor = predictor
        self._free_bytes = free_bytes

    def view(self) -> dict[str, Any]:
        facts, model, rates = self._facts, self._model, self._predictor.rates
        free = self._free_bytes()
        checks = [kernels_check(facts.kernels), self._memory(free), disk_check(self._settings, 0)]
        wrong = [check for check in checks if check.state != "ok"]
        fit: Fit = "ok" if checks[1].state == "ok" else "tight"
        return {
            "object": "machine",
            "version": __version__,
            "model": {
                "id": model.model_id,
                "parameters": facts.parameters,
                "window_tokens": model.window_tokens,
                "languages": sorted(model.languages),
                "licence": model.licence,
                "bytes": model.file_bytes,
                "runtime": self._settings.runtime.backend,
            },
            "cores": facts.threads,
            "memory": {
                "total_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
                "free_bytes": free,
                "model_bytes": model.file_bytes,
                "kv_bytes": facts.kv_bytes,
                "kv_tokens": facts.kv_tokens,
            },
            "fit": fit,
            "rates": {
                "measured": self._predictor.measured,
                "prefill_tokens_per_s": round(1 / rates.prefill_s_per_token, 1),
                "decode_tokens_per_s": round(1 / rates.decode_s, 1),
                "tokens_within_deadline": rates.tokens_within(self._settings.deadlines.interactive_s),
            },
            "kernels": {"path": facts.kernels, "native": not facts.kernels.startswith(REFERENCE)},
            "warnings": [f"{check.name.capitalize()}: {check.detail}" for check in wrong],
            "checks": [asdict(check) for check in checks],
        }

    def _memory(self, free: int) -> Check:
        """Beside what is loaded: a prompt's activations, parsers and other programs need some."""
        facts = self._facts
        detail = f"{human_bytes(free)} free beside the model and {human_bytes(facts.kv_bytes)} of KV"
        if free < BASE_BYTES:
            fix = f"perilune --set kv_cache.ram={facts.kv_bytes // 2 // 1024**2}M serve"
            return Check("memory", "warning", f"{detail}: other programs may slow answers down.", fix)
        if self._model.window_tokens < facts.trained_tokens:
            held = f"KV holds {facts.kv_tokens:,} tokens, less than the model's window of {facts.trained_tokens:,}"
            return Check("memory", "warning", f"{detail}; {held}.", "perilune doctor")
        return Check("memory", "ok", detail)
