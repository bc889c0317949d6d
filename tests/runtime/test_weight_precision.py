"""Precision by module, and GPTQ and AWQ folders: what is packed how, and that logits follow the stored numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch

from perilune.errors import UnsupportedModel
from perilune.kernels import packing
from perilune.kernels import select as kernel_choice
from perilune.kernels.reference import ReferenceKernels
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.weights import DecodeWeights, WeightBuilder, memory_need, policy_text, precision_of
from tests.runtime.families import divergence, make_model, start
from tests.runtime.gguf_models import write_gguf
from tests.runtime.test_logits import prompts, reference_logits

EXACT = ReferenceKernels("oracle tests")
PLENTY = 1 << 40
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# ------------------------------------------------------------------------------------------------ by module


@pytest.mark.parametrize(
    ("policy", "part", "tied", "expected"),
    [
        ("int8", "q", False, "int8"),
        ({}, "q", False, "auto"),
        ({"default": "bf16"}, "head", False, "bf16"),
        ({"default": "bf16", "mlp": "int8", "down": "stored"}, "down", False, "stored"),
        ({"default": "bf16", "mlp": "int8", "down": "stored"}, "up", False, "int8"),
        ({"attention": "int8", "lm_head": "bf16"}, "embed", True, "bf16"),
        ({"embeddings": "int8", "lm_head": "bf16"}, "embed", False, "int8"),
    ],
)
def test_the_narrowest_name_counts(policy: DecodeWeights, part: str, tied: bool, expected: str) -> None:
    assert precision_of(policy, part, tied) == expected


MIXED: DecodeWeights = {"default": "stored", "lm_head": "bf16", "mlp": "int8", "v": "bf16"}


@pytest.fixture(scope="module")
def q4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("mixed")
    model = make_model("llama-untied", folder / "hf")
    return model, write_gguf(folder / "base.gguf", model, "llama", gguf.GGMLQuantizationType.Q4_1)


def test_each_module_is_packed_as_it_is_told(q4: tuple[Any, Path]) -> None:
    checkpoint = open_checkpoint(q4[1])
    weights = WeightBuilder(checkpoint, EXACT, "bf16", MIXED, 64).build(PLENTY)
    assert weights.decode is not None
    for layer in weights.decode.layers:
        assert [part.kind for part in layer.qkv] == ["q4", "q4", "bf16"]
        assert [layer.o.kind, layer.down.kind] == ["q4", "int8"]
        assert [part.kind for part in layer.gate_up] == ["int8", "int8"]
    assert weights.decode.head.kind == "bf16"
    assert weights.resident == "bf16+bf16+int8+q4"
    assert weights.policy == policy_text(MIXED) == "default=stored,lm_head=bf16,mlp=int8,v=bf16"
    packed = [part for layer in weights.decode.layers for part in (*layer.qkv, *layer.gate_up, layer.o, layer.down)]
    embed = 320 * 64 // 32 * 20  # read where it lies, in the packed form
    assert memory_need(checkpoint, "bf16", MIXED).decode_bytes == embed + sum(
        part.data.nbytes for part in (*packed, weights.decode.head)
    )


def test_mixed_modules_decode_as_their_numbers_say(q4: tuple[Any, Path]) -> None:
    model, path = q4
    parts = prompts(320, (40, 70))
    expected = reference_logits(model, [[*part, 5] for part in parts])
    running = start(path, kernel_choice.load(1), precision="bf16", policy=MIXED)
    running.prefill(parts)
    assert divergence(expected, running.decode([5, 5], [40, 70])) < 0.01


# ---------------------------------------------------------------------------------------------- GPTQ and AWQ


def quantise(weight: np.ndarray[Any, Any], groups: np.ndarray[Any, Any], bits: int) -> tuple[Any, Any, Any, Any]:
    """Plain loops: q [in, out], zeros and scales [group, out], and the values they stand for [out, in]."""
    outs, ins = weight.shape
    top = 2**bits - 1
    count = int(groups.max()) + 1
    q = np.zeros((ins, outs), np.int64)
    zeros = np.zeros((count, outs), np.int64)
    scales = np.zeros((count, outs), np.float16)
    values = np.zeros_like(weight)
    for g in range(count):
        for o in range(outs):
            inside = np.flatnonzero(groups == g)
            row = weight[o, inside]
            low, high = min(row.min(), 0.0), max(row.max(), 0.0)
            scale = np.float16((high - low) / top)
            zero = min(top, max(1, round(-low / float(scale))))
            q[inside, o] = np.clip(np.round(row / float(scale)) + zero, 0, top)
            zeros[g, o], scales[g, o] = zero, scale
            values[o, inside] = float(scale) * (q[inside, o] - zero)
    return q, zeros, scales, values


def words(numbers: np.ndarray[Any, Any], bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """[rows, n] -> int32 [rows, n / numbers in a word]; place p of a word holds number `order[p]`."""
    per_word = 32 // bits
    packed = np.zeros((numbers.shape[0], numbers.shape[1] // per_word), np.uint32)
    for row in range(numbers.shape[0]):
        for word in range(packed.shape[1]):
            for place in range(per_word):
                packed[row, word] |= np.uint32(int(numbers[row, word * per_word + order[place]]) << (bits * place))
    return torch.from_numpy(packed.view(np.int32))


def quantised_folder(family: str, folder: Path, config: dict[str, Any], act_order: bool = False) -> Any:
    """The model that the folder's packed numbers stand for."""
    model = make_model(family, folder)
    bits, size = config["bits"], config["group_size"]
    plain = tuple(range(32 // bits))
    state = safetensors.torch.load_file(folder / "model.safetensors")
    for name, weight in list(state.items()):
        if not any(f"{linear}.weight" in name for linear in LINEARS):
            continue
        ins = weight.shape[1]
        groups = np.arange(ins) // (size if size > 0 else ins)
        if act_order:
            groups = np.random.default_rng(1).permutation(groups)
        q, zeros, scales, values = quantise(weight.numpy(), groups, bits)
        module = name.removesuffix("weight")
        del state[name]
        state[f"{module}scales"] = torch.from_numpy(scales)
        if config["quant_method"] == "gptq":
            stored_zeros = zeros - (config.get("checkpoint_format") != "gptq_v2")
            state[f"{module}qweight"] = words(q.T, bits, plain).T.contiguous()
            state[f"{module}qzeros"] = words(stored_zeros, bits, plain)
            state[f"{module}g_idx"] = torch.from_numpy(groups.astype(np.int32))
        else:
            state[f"{module}qweight"] = words(q, bits, (0, 2, 4, 6, 1, 3, 5, 7))
            state[f"{module}qzeros"] = words(zeros, bits, (0, 2, 4, 6, 1, 3, 5, 7))
        model.get_parameter(name).data.copy_(torch.from_numpy(values))
    safetensors.torch.save_file(state, folder / "model.safetensors")
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"quantization_config": config}))
    return model


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}


@pytest.mark.parametrize(
    ("family", "config", "act_order"),
    [
        ("llama-untied", GPTQ, False),
        ("qwen2-biases", GPTQ, True),
        ("llama-untied", {**GPTQ, "checkpoint_format": "gptq_v2"}, False),
        ("llama-untied", {**GPTQ, "bits": 8, "group_size": -1}, False),
        ("llama-untied", AWQ, False),
        ("qwen2-biases", AWQ, False),
    ],
    ids=["gptq", "gptq act order", "gptq v2", "gptq 8 bits", "awq", "awq biases"],
)
def test_packed_integers_load(family: str, config: dict[str, Any], act_order: bool, tmp_path: Path) -> None:
    model = quantised_folder(family, tmp_path, config, act_order)
    parts = prompts(320)
    expected = reference_logits(model, parts)
    torch.testing.assert_close(start(tmp_path, EXACT).prefill(parts), expected, atol=2e-4, rtol=1e-4)


def test_packed_integers_are_served_as_int8(tmp_path: Path) -> None:
    quantised_folder("llama-untied", tmp_path, GPTQ)
    weights = WeightBuilder(open_checkpoint(tmp_path), EXACT, "bf16", "auto", 64).build(PLENTY)
    assert weights.decode is not None
    packed = weights.decode.layers[0].down
    exact = open_checkpoint(tmp_path).tensor("down", 0).float32()
    assert packed.kind == "int8"
    assert float((packing.unpack(packed) - exact).abs().max()) <= float(exact.abs().max()) / 127


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({**GPTQ, "bits": 3}, "bits=3"),
        ({**AWQ, "version": "gemv"}, "gemv"),
        ({**GPTQ, "group_size": "all"}, "not a number"),
    ],
)
def test_other_packings_are_refused(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    quantised_folder("llama-untied", tmp_path, GPTQ)
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told | {"quantization_config": config}))
    with pytest.raises(UnsupportedModel, match=says):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("scales", None),
        ("scales", torch.ones(1, 64, dtype=torch.float16)),
        ("qweight", torch.zeros(8, 64)),
        ("g_idx", torch.full((64,), 99, dtype=torch.int32)),
        ("g_idx", torch.zeros(3, dtype=torch.int32)),
    ],
)
def test_damaged_packings_are_refused(part: str, value: torch.Tensor | None, tmp_path: Path) -> None:
    quantised_folder("llama-untied", tmp_path, GPTQ)
    file = tmp_path / "model.safetensors"
    state = safetensors.torch.load_file(file)
    name = f"model.layers.0.self_attn.q_proj.{part}"
    del state[name]
    if value is not None:
        state[name] = value
    safetensors.torch.save_file(state, file)
    with pytest.raises(UnsupportedModel, match=r"q_proj\.weight"):
        open_checkpoint(tmp_path).tensor("q", 0)
