"""Transformers in bf16 with SDPA attention: the plain PyTorch way, one forward pass per prompt."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bench.worker import BenchEngine, LoadSpec


class Transformers:
    """One model; `decode` keeps the prompt's cache and crops what was generated after it."""

    def __init__(self, spec: LoadSpec) -> None:
        torch.set_num_threads(spec.threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            spec.model, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self._cache: Any = None
        self._held: list[int] = []
        self._held_first = 0

    @torch.inference_mode()
    def prefill(self, token_ids: list[int]) -> int:
        self._held = []
        self._cache = DynamicCache(config=self._model.config)
        return self._step(token_ids)

    @torch.inference_mode()
    def decode(self, token_ids: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
        if token_ids != self._held:
            self._held_first = self.prefill(token_ids)
            self._held = list(token_ids)
        if generated := self._cache.get_seq_length() - len(token_ids):
            self._cache.crop(-generated)
        tokens, seconds = [self._held_first], []
        while len(tokens) < new_tokens:
            start = time.perf_counter()
            tokens.append(self._step(tokens[-1:]))
            seconds.append(time.perf_counter() - start)
        return tokens, seconds

    def close(self) -> None:
        self._cache = None

    def _step(self, token_ids: list[int]) -> int:
        output = self._model(
            torch.tensor([token_ids]), past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        return int(output.logits[0, -1].argmax())


def load(spec: LoadSpec) -> BenchEngine:
    return Transformers(spec)
