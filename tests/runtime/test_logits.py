"""Logits equal `transformers` in fp32 on the same weights, for every family and for the real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perilune.kernels import select as kernel_choice
from perilune.kernels.reference import ReferenceKernels
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.gguf_file import GGUFFile
from perilune.runtime.tokenizer import load_tokenizer
from tests.runtime.families import FAMILIES, divergence, make_model, start

EXACT = ReferenceKernels("oracle tests")
LENGTHS = (1, 31, 33, 150)


def prompts(vocab: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def reference_logits(model: Any, parts: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([model(torch.tensor([part]), logits_to_keep=1).logits[0, -1] for part in parts])


@pytest.mark.parametrize("family", FAMILIES)
def test_random_family(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path)
    parts = prompts(320)
    ours = start(tmp_path, EXACT).prefill(parts)
    expected = reference_logits(model, parts)
    assert expected.std() > 0.1, "a model that says nothing can't be told apart"
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_precisions_stay_near(family: str, tmp_path: Path) -> None:
    """bf16 prefill, then one token through the packed decode step, with this machine's kernels."""
    model = make_model(family, tmp_path)
    parts = prompts(320, (40, 70))
    expected = reference_logits(model, [*parts, *[[*part, 5] for part in parts]])
    running = start(tmp_path, kernel_choice.load(1), precision="bf16", policy="bf16")
    ours = torch.cat([running.prefill(parts), running.decode([5, 5], [40, 70])])
    scale = float(expected.std())
    assert float((ours - expected).abs().max()) < 0.25 * scale + 0.1
    assert divergence(expected, ours) < 0.01


# ----------------------------------------------------------------------------------------- the real models


def smollm2_oracle(path: Path) -> Any:
    """SmolLM2 in `transformers`, its weights dequantised by the `gguf` package and put into place here."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = dequantised(path, names)
    for key in list(state):
        for name, heads in (("q_proj", 9), ("k_proj", 3)):
            if name in key:  # llama.cpp keeps neighbouring pairs together; transformers, halves
                rows = state[key]
                state[key] = rows.view(heads, 32, 2, -1).transpose(1, 2).reshape(rows.shape)
    return loaded(transformers.LlamaForCausalLM, config, state)


def gemma_oracle(path: Path) -> Any:
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        sliding_window=512,
        query_pre_attn_scalar=256,
    )
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    state = dequantised(path, names)
    state = {key: value - 1 if "norm" in key else value for key, value in state.items()}
    return loaded(transformers.Gemma3ForCausalLM, config, state)


def dequantised(path: Path, layer_names: dict[str, str]) -> dict[str, torch.Tensor]:
    import gguf

    file = GGUFFile(path)
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    state = {}
    for name, info in file.tensors.items():
        stored = file.tensor(name)
        values = gguf.dequantize(np.array(stored.raw), gguf.GGMLQuantizationType[info.kind])
        stem = name.removesuffix(".weight")
        if stem in whole:
            key = whole[stem]
        else:
            _, layer, part = stem.split(".")
            key = f"model.layers.{layer}.{layer_names[part]}"
        state[f"{key}.weight"] = torch.tensor(values).reshape(info.shape)
    return state


def loaded(kind: Any, config: Any, state: dict[str, torch.Tensor]) -> Any:
    with torch.device("meta"):
        model = kind(config)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for name, module in model.named_modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            state_key = f"{name}.{key}"
            assert "rotary" in state_key or buffer.numel() == 1, state_key
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert not unexpected, unexpected
    assert not missing, missing
    fresh = kind(shrunk(config))
    for name, module in model.named_modules():
        for key, _ in list(module.named_buffers(recurse=False)):
            donor = dict(fresh.named_modules())[name]
            setattr(module, key, getattr(donor, key).clone())
    return model.eval()


def shrunk(config: Any) -> Any:
    """The same config with small matrices: its buffers (rotary frequencies, scales) are the same."""
    import copy

    small = copy.deepcopy(config)
    small.vocab_size, small.intermediate_size = 8, 8
    return small


def check_real(path: Path, oracle: Any, vocab: int, lengths: tuple[int, ...]) -> None:
    parts = prompts(vocab, lengths)
    expected = reference_logits(oracle, parts)
    ours = start(path, EXACT, max_tokens=max(lengths) + 1).prefill(parts)
    scale = float(expected.abs().max())
    assert float((ours - expected).abs().max()) < 1e-4 * scale
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


@pytest.fixture(scope="module")
def smollm2_exact(smollm2_path: Path) -> Any:
    return smollm2_oracle(smollm2_path)


def test_smollm2(smollm2_path: Path, smollm2_exact: Any) -> None:
    check_real(smollm2_path, smollm2_exact, 49152, (9, 140))


def test_smollm2_as_it_serves(smollm2_path: Path, smollm2_exact: Any) -> None:
    """bf16 prefill and packed decode on English text, against fp32: it says the same, up to ties."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = load_tokenizer(open_checkpoint(smollm2_path)).encode(text)[:320]
    with torch.no_grad():
        expected = smollm2_exact(torch.tensor([ids])).logits[0]
    running = start(smollm2_path, kernel_choice.load(1), precision="bf16", max_tokens=352)
    assert running.weights.resident == "bf16+int8+q4"
    at = [60, 130, 200, 280]
    prefilled = running.prefill([ids[: index + 1] for index in at])
    decoded = torch.cat([running.decode([ids[index]], [index]) for index in range(61, 131)])
    assert divergence(expected[at], prefilled) < 0.01
    assert divergence(expected[61:131], decoded) < 0.01
    agreement = (decoded.argmax(-1) == expected[61:131].argmax(-1)).float().mean()
    assert agreement > 0.95


def test_gemma(gemma_path: Path) -> None:
    """Longer than its sliding window of 512."""
    check_real(gemma_path, gemma_oracle(gemma_path), 262144, (17, 540))
