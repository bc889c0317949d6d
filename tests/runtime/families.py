"""Small random models of every family, made by `transformers` from a fixed seed, and ways to get their logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perilune.core import BLOCK_TOKENS
from perilune.kernels.interface import Kernels, KVLayout, RaggedBatch
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.loader import with_lora
from perilune.runtime.models.decoder import Decoder
from perilune.runtime.mri import CancelFlag
from perilune.runtime.weights import DecodeWeights, ModelWeights, Precision, WeightBuilder

PLENTY = 1 << 40
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
GEMMA = {
    "num_hidden_layers": 7,
    "sliding_window": 24,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-untied": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied-llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama-biases-linear": ("Llama", {"attention_bias": True, "rope_parameters": LINEAR}),
    "mistral-sliding": ("Mistral", {"sliding_window": 20}),
    "qwen2-biases": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3-qk-norm": ("Qwen3", {}),
    "gemma3-sliding": ("Gemma3", GEMMA),
}


def make_model(family: str, folder: Path) -> Any:
    """The `transformers` model (fp32, eval), saved to `folder` as safetensors."""
    import transformers

    name, extra = FAMILIES[family]
    text = "Text" if name == "Gemma3" else ""
    config = getattr(transformers, f"{name}{text}Config")(**{**SIZES, **extra})
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


@dataclass(frozen=True, slots=True)
class Running:
    """A decoder over a pool of its own; sequence s gets blocks s*`span` …"""

    decoder: Decoder
    weights: ModelWeights
    span: int

    def _batch(self, counts: Sequence[int], lengths: Sequence[int]) -> RaggedBatch:
        tables = torch.arange(len(counts) * self.span, dtype=torch.int32).view(len(counts), self.span)
        bounds = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        return RaggedBatch(bounds, torch.tensor(lengths, dtype=torch.int32), tables.contiguous())

    def prefill(self, parts: Sequence[Sequence[int]], starts: Sequence[int] | None = None) -> torch.Tensor:
        """Last-position logits [len(parts), vocab] of parts that begin at `starts`."""
        begun = starts or [0] * len(parts)
        lengths = [start + len(part) for start, part in zip(begun, parts, strict=True)]
        ids = torch.tensor([token for part in parts for token in part])
        batch = self._batch([len(part) for part in parts], lengths)
        return self.decoder.prefill(ids, batch, torch.arange(len(parts)), CancelFlag())

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        batch = self._batch([1] * len(tokens), [position + 1 for position in positions])
        return self.decoder.decode(torch.tensor(tokens), batch, CancelFlag())


def start(
    path: Path,
    kernels: Kernels,
    *,
    precision: Precision = "fp32",
    policy: DecodeWeights = "auto",
    sequences: int = 4,
    max_tokens: int = 256,
    lora: Path | None = None,
) -> Running:
    checkpoint = with_lora(open_checkpoint(path), lora)
    weights = WeightBuilder(checkpoint, kernels, precision, policy, max_tokens).build(PLENTY)
    config = checkpoint.config
    span = -(-max_tokens // BLOCK_TOKENS)
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, precision)
    pool = kernels.allocate_pool(layout, sequences * span)
    return Running(Decoder(weights, kernels, pool), weights, span)


def divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence of rows of logits."""
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
