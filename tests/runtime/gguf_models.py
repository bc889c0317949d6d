"""Small GGUF files written by the `gguf` package, laid out as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def write_gguf(
    path: Path,
    model: Any,
    arch: str,
    kind: gguf.GGMLQuantizationType,
    *,
    changes: dict[str, Any] | None = None,
    rope_divisors: Any = None,
    merges: Sequence[str] = (),
) -> Path:
    """A `transformers` model as GGUF; matrices quantised as `kind`. `changes` overrides metadata keys.
    llama.cpp wants at least one of `merges`.

    Returns the path; the weights as the file holds them are written back into `model`.
    """
    import torch

    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (changes or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key, value)
    tokens = [f"<t{index}>" for index in range(config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    state = model.state_dict()
    for name, value in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.float().numpy()
        stored = array if array.ndim == 1 else _quantised(array, kind)
        if array.ndim == 2:
            exact = gguf.dequantize(stored, kind) if kind not in (0, 1) else stored.astype(np.float32)
            state[name] = torch.tensor(exact.reshape(array.shape))
        stored = _permuted(name, stored, config, arch)
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=kind if array.ndim == 2 else None)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _quantised(array: Any, kind: gguf.GGMLQuantizationType) -> Any:
    return gguf.quantize(array, kind)


def _permuted(name: str, stored: Any, config: Any, arch: str) -> Any:
    """llama.cpp's converter puts the pairs that are rotated together side by side (LlamaModel.permute)."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if arch == "llama" and part in name:
            grouped = stored.reshape(count, 2, stored.shape[0] // count // 2, *stored.shape[1:])
            return np.ascontiguousarray(grouped.swapaxes(1, 2).reshape(stored.shape))
    return stored


def _gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, suffix = name.rsplit(".", 1)
    if stem in whole:
        return f"{whole[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[part]}.{suffix}"
