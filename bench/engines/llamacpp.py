"""llama.cpp through llama-cpp-python's C interface, in its fastest settings here, on the GGUF as stored."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import llama_cpp
import numpy as np

from bench.worker import BenchEngine, LoadSpec

_BATCH_TOKENS = 2048
_MICRO_BATCH_TOKENS = 512


class LlamaCpp:
    """One context with one sequence. `decode` keeps a prompt's KV and drops what was generated after it."""

    def __init__(self, spec: LoadSpec, *, kv_type: int | None = None, room_tokens: int = 0) -> None:
        self._llm: Any = llama_cpp.Llama(
            model_path=spec.model,
            n_ctx=spec.max_context_tokens + room_tokens,
            n_batch=_BATCH_TOKENS,
            n_ubatch=_MICRO_BATCH_TOKENS,
            n_threads=spec.threads,
            n_threads_batch=spec.threads,
            flash_attn=True,
            type_k=kv_type,
            type_v=kv_type,
            verbose=False,
        )
        self._context = self._llm.ctx
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = self._llm.n_vocab()
        self._held: list[int] = []
        self._held_first = 0

    def prefill(self, token_ids: list[int]) -> int:
        llama_cpp.llama_memory_clear(self._memory, True)
        self._held = []
        for start in range(0, len(token_ids), _BATCH_TOKENS):
            self._evaluate(token_ids[start : start + _BATCH_TOKENS])
        return self._best()

    def decode(self, token_ids: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
        if token_ids != self._held:
            self._held_first = self.prefill(token_ids)
            self._held = list(token_ids)
        llama_cpp.llama_memory_seq_rm(self._memory, 0, len(token_ids), -1)
        tokens, seconds = [self._held_first], []
        while len(tokens) < new_tokens:
            start = time.perf_counter()
            self._evaluate(tokens[-1:])
            tokens.append(self._best())
            seconds.append(time.perf_counter() - start)
        return tokens, seconds

    def close(self) -> None:
        self._llm.close()

    def _evaluate(self, token_ids: list[int]) -> None:
        buffer = (llama_cpp.llama_token * len(token_ids))(*token_ids)
        code = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(buffer, len(token_ids)))
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")

    def _best(self) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        view = np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocabulary,))
        return int(view.argmax())


def load(spec: LoadSpec) -> BenchEngine:
    return LlamaCpp(spec)
