"""Our own engine as the service runs it: the engine loop over the torch runtime, with its own chunk sizes.

No disk tier. Every `prefill` has a hash seed of its own, so nothing is reused; `decode` shares its prompt's blocks
between calls, as a conversation does.
"""

from __future__ import annotations

import queue
import time
from itertools import pairwise
from pathlib import Path

from bench.worker import BenchEngine, LoadSpec
from perilune.core import EngineEvent, EngineFinished, EngineToken, FinishReason, SamplingParams, SequenceSpec
from perilune.engine.loop import EngineLoop
from perilune.engine.policy import EngineLimits
from perilune.runtime.loader import load_model

_KV_BYTES = 1024**3


class Perilune:
    """One sequence at a time; token times are taken where the engine emits them."""

    def __init__(self, spec: LoadSpec) -> None:
        self._model = load_model(Path(spec.model), threads=spec.threads, kv_bytes=_KV_BYTES)
        self._engine = EngineLoop(self._model.runtime, None, EngineLimits())
        self._engine.start()
        self._serial = 0

    def prefill(self, token_ids: list[int]) -> int:
        tokens, _ = self._generate(token_ids, 1, f"fresh {self._serial}", shared_tokens=0)
        return tokens[0]

    def decode(self, token_ids: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
        return self._generate(token_ids, new_tokens, "decode", shared_tokens=len(token_ids))

    def close(self) -> None:
        self._engine.close()
        self._model.close()

    def _generate(
        self, token_ids: list[int], new_tokens: int, salt: str, shared_tokens: int
    ) -> tuple[list[int], list[float]]:
        self._serial += 1
        arrivals: queue.SimpleQueue[tuple[EngineEvent, float]] = queue.SimpleQueue()
        request = SequenceSpec(
            seq_id=str(self._serial),
            token_ids=token_ids,
            salt=salt.encode().ljust(32),
            sampling=SamplingParams(ignore_eos=True),
            max_new_tokens=new_tokens,
            shared_tokens=shared_tokens,
        )
        self._engine.submit(request, lambda event: arrivals.put((event, time.perf_counter())))
        tokens: list[int] = []
        times: list[float] = []
        while True:
            event, arrived_s = arrivals.get(timeout=600)
            if isinstance(event, EngineToken):
                tokens.append(event.token_id)
                times.append(arrived_s)
            elif isinstance(event, EngineFinished):
                if event.reason is FinishReason.ERROR:
                    raise RuntimeError(event.error)
                break
        return tokens, [later - earlier for earlier, later in pairwise(times)]


def load(spec: LoadSpec) -> BenchEngine:
    return Perilune(spec)
