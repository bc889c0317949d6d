"""Model files: every number format reads exactly, GGUF and safetensors agree, and what is broken says so."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perilune.errors import ConfigError, Overloaded, UnsupportedModel
from perilune.kernels import select as kernel_choice
from perilune.kernels.reference import ReferenceKernels
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.dense import DenseMatrix
from perilune.runtime.gguf_file import GGUFFile
from perilune.runtime.loader import describe_model, load_model
from perilune.runtime.memory import free_memory_bytes
from perilune.runtime.stored import BLOCK_KINDS, StoredTensor
from perilune.runtime.weights import DecodeWeights, WeightBuilder, memory_need
from tests.runtime.families import PLENTY, divergence, make_model, start
from tests.runtime.gguf_models import write_gguf

EXACT = ReferenceKernels("oracle tests")
KINDS = gguf.GGMLQuantizationType
PARTS = [list(range(3, 40)), list(range(50, 190, 2))]


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([model(torch.tensor([part])).logits[0, -1] for part in PARTS])


@pytest.fixture(scope="module")
def model_and_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("llama")
    return make_model("llama-untied", folder), folder


# ---------------------------------------------------------------------------------------------- good files


@pytest.mark.parametrize(
    "kind", [KINDS.F32, KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1, KINDS.Q5_0, KINDS.Q5_1]
)
@pytest.mark.parametrize(
    ("family", "arch"), [("llama-tied-llama3", "llama"), ("qwen2-biases", "qwen2"), ("qwen3-qk-norm", "qwen3")]
)
def test_gguf_equals_transformers(family: str, arch: str, kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "folder")
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    model = type(model)(model.config).eval()
    path = write_gguf(tmp_path / "model.gguf", model, arch, kind)
    torch.testing.assert_close(start(path, EXACT).prefill(PARTS), logits_of(model), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1, KINDS.Q5_0, KINDS.Q5_1, KINDS.F16])
def test_packed_weights_stay_near(
    model_and_folder: tuple[Any, Path], kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    """bf16 prefill and packed decode of a quantised file, against the file's exact weights."""
    model = make_model("llama-untied", tmp_path / "folder")
    path = write_gguf(tmp_path / "model.gguf", model, "llama", kind)
    running = start(path, kernel_choice.load(1), precision="bf16")
    running.prefill([part[:-1] for part in PARTS])
    decoded = running.decode([part[-1] for part in PARTS], [len(part) - 1 for part in PARTS])
    assert divergence(logits_of(model), decoded) < 0.01
    assert running.weights.resident.startswith("bf16+")


def test_rope_divisors_from_gguf(tmp_path: Path) -> None:
    """`rope_freqs.weight` holds what llama3 scaling divides frequencies by (convert_hf_to_gguf.py)."""
    model = make_model("llama-tied-llama3", tmp_path / "folder")
    base = model.config.rope_parameters["rope_theta"]
    wavelengths = 2 * np.pi * base ** (np.arange(0, 16, 2) / 16)
    smooth = (64 / wavelengths - 1.0) / (4.0 - 1.0)
    divisors = np.where(wavelengths < 16, 1.0, np.where(wavelengths > 64, 8.0, 1 / ((1 - smooth) / 8.0 + smooth)))
    assert len(set(divisors.tolist())) > 2
    path = write_gguf(tmp_path / "m.gguf", model, "llama", KINDS.F32, rope_divisors=divisors.astype(np.float32))
    torch.testing.assert_close(start(path, EXACT).prefill(PARTS), logits_of(model), atol=2e-4, rtol=1e-4)


def test_yarn_from_gguf(tmp_path: Path) -> None:
    model = make_model("qwen2-yarn", tmp_path / "folder")
    model.config.rope_parameters["rope_theta"] = 10000.0
    changes = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 128,
    }
    path = write_gguf(tmp_path / "yarn.gguf", model, "qwen2", KINDS.F32, changes=changes)
    torch.testing.assert_close(start(path, EXACT).prefill(PARTS), logits_of(model), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_every_quantisation_reads_what_gguf_reads(kind: str) -> None:
    cols, size = BLOCK_KINDS[kind]
    assert gguf.GGML_QUANT_SIZES[KINDS[kind]] == (cols, size)
    raw = np.random.default_rng(0).integers(0, 64, (4, 3 * size), dtype=np.uint8)
    stored = StoredTensor("t", kind, 4, 3 * cols, raw)
    expected = torch.from_numpy(gguf.dequantize(raw, KINDS[kind]))
    assert torch.equal(torch.nan_to_num(stored.float32()), torch.nan_to_num(expected))


def test_metadata_reads_what_gguf_reads(smollm2_path: Path) -> None:
    file, reader = GGUFFile(smollm2_path), gguf.GGUFReader(smollm2_path)
    assert file.strings("tokenizer.ggml.tokens") == reader.fields["tokenizer.ggml.tokens"].contents()
    assert file.string_at("tokenizer.ggml.tokens", 100) == file.strings("tokenizer.ggml.tokens")[100]
    assert file.integer("llama.block_count") == reader.fields["llama.block_count"].contents()
    assert [tensor.name for tensor in reader.tensors] == list(file.names)
    for tensor in reader.tensors[:12]:
        assert np.array_equal(
            file.tensor(tensor.name).raw.reshape(-1), np.asarray(tensor.data).view(np.uint8).reshape(-1)
        )


def test_sharded_folder_equals_whole(model_and_folder: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = model_and_folder
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(start(tmp_path, EXACT).prefill(PARTS), start(folder, EXACT).prefill(PARTS))


def test_multimodal_gemma_folder_runs_its_text_model(tmp_path: Path) -> None:
    """Gemma 3's larger folders nest the text model's config and name its tensors so."""
    from safetensors.torch import load_file, save_file

    model = make_model("gemma3-sliding", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    state = load_file(tmp_path / "model.safetensors")
    save_file({f"language_model.{key}": value for key, value in state.items()}, tmp_path / "model.safetensors")
    torch.testing.assert_close(start(tmp_path, EXACT).prefill(PARTS), logits_of(model), atol=2e-4, rtol=1e-4)


# ----------------------------------------------------------------------------------------------- bad files


def refused(path: Path) -> UnsupportedModel:
    with pytest.raises(UnsupportedModel) as caught:
        WeightBuilder(open_checkpoint(path), EXACT, "fp32", "auto", 64).build(PLENTY)
    assert caught.value.hint
    return caught.value


def test_unknown_things_name_what_is_supported(model_and_folder: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = model_and_folder
    path = write_gguf(tmp_path / "m.gguf", model, "llama", KINDS.Q8_0)
    data = path.read_bytes()
    (tmp_path / "arch.gguf").write_bytes(data.replace(b"llama", b"mamba"))
    assert "mamba" in str(refused(tmp_path / "arch.gguf"))
    assert "qwen3" in str(refused(tmp_path / "arch.gguf"))
    tq = write_gguf(tmp_path / "tq.gguf", make_model("llama-untied", tmp_path / "f"), "llama", KINDS.F32)
    at = tq.read_bytes().index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    broken = bytearray(tq.read_bytes())
    broken[at : at + 4] = struct.pack("<I", 19)
    tq.write_bytes(broken)
    assert "IQ1_S" in str(refused(tq))
    assert "Q4_K" in str(refused(tq))
    shutil.copytree(folder, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    for change, word in (
        ({"model_type": "bert"}, "gemma3"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_act": "relu"}, "silu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "yarn"),
        ({"num_key_value_heads": 3}, "heads"),
        ({"head_dim": 8}, "16"),
        ({"head_dim": 528}, "512"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"intermediate_size": 64}, "gate"),
        ({"attn_logit_softcapping": 50.0}, "softcapping"),
    ):
        (tmp_path / "other" / "config.json").write_text(json.dumps({**config, **change}))
        assert word in str(refused(tmp_path / "other")), change


def test_broken_folders(model_and_folder: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = model_and_folder
    refused(tmp_path / "missing")
    refused(tmp_path)
    for name, content in (("config.json", b"{"), ("config.json", b"[]"), ("model.safetensors", b"\xff" * 64)):
        target = tmp_path / f"broken{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folder, target)
        (target / name).write_bytes(content)
        refused(target)
    target = tmp_path / "cut"
    shutil.copytree(folder, target)
    whole = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(target)
    (target / "model.safetensors").unlink()
    (target / "pytorch_model.bin").write_bytes(b"pickle")
    assert "safetensors" in str(refused(target))
    index = {"weight_map": {"a": "../../etc/passwd"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(target)


@pytest.mark.parametrize("share", [0, 3, 20, 1000, 0.2, 0.5, 0.99])
def test_cut_gguf(model_and_folder: tuple[Any, Path], share: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", model_and_folder[0], "llama", KINDS.F16)
    size = path.stat().st_size
    os.truncate(path, int(share if share >= 1 or share == 0 else size * share))
    refused(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_gguf_headers_never_crash(
    model_and_folder: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any byte of the header may be wrong: the file opens or is refused, nothing else."""
    folder = model_and_folder[1]
    path = folder / "fuzz.gguf"
    if not path.exists():
        write_gguf(path, model_and_folder[0], "llama", KINDS.Q8_0)
    whole = path.read_bytes()
    broken = bytearray(whole[: 8192 + 4096])
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, 8191))] = data.draw(st.integers(0, 255))
    target = folder / "fuzzed.gguf"
    target.write_bytes(bytes(broken) + whole[len(broken) :])
    try:
        checkpoint = open_checkpoint(target)
        checkpoint.tensor("embed")
    except UnsupportedModel:
        return


# ------------------------------------------------------------------------------------------ memory and loading


def test_one_copy_when_two_do_not_fit(model_and_folder: tuple[Any, Path]) -> None:
    _, folder = model_and_folder
    checkpoint = open_checkpoint(folder)
    need = memory_need(checkpoint, "bf16", "auto")
    builder = WeightBuilder(checkpoint, kernel_choice.load(1), "bf16", "auto", 64)
    both = builder.build(need.total_bytes)
    assert both.decode is not None
    assert both.resident == "bf16+int8"
    one = WeightBuilder(checkpoint, kernel_choice.load(1), "bf16", "auto", 64).build(need.total_bytes - 1)
    assert one.decode is None
    assert one.resident == "bf16"
    with pytest.raises(Overloaded, match="MiB"):
        builder.build(need.one_copy_bytes - 1)


def test_describe_predicts_what_loading_takes(smollm2_path: Path) -> None:
    described = describe_model(smollm2_path)
    assert described.parameters == 134_479_872
    assert described.max_context_tokens == 8192
    assert described.has_chat_template
    assert described.languages == ("en",)
    assert described.kv_token_bytes == 2 * 30 * 3 * 64 * 2
    weights = WeightBuilder(open_checkpoint(smollm2_path), kernel_choice.load(1), "bf16", "auto", 64).build(PLENTY)
    tensors: list[torch.Tensor | DenseMatrix] = []
    for layer in weights.layers:
        tensors += [layer.qkv, layer.o, layer.gate_up, layer.down]
    assert weights.decode is not None
    for packed in weights.decode.layers:
        tensors += [part.data for part in (*packed.qkv, packed.o, *packed.gate_up, packed.down)]
    tensors.append(weights.decode.head.data)
    taken = sum(tensor.nbytes for tensor in tensors)
    predicted = described.need.prefill_bytes + described.need.decode_bytes
    assert taken < predicted * 1.02
    assert taken > predicted * 0.7


@pytest.mark.parametrize("policy", ["auto", "stored", "int8", "bf16"])
def test_the_decode_copy_of_k_quants_is_predicted(gemma_path: Path, policy: DecodeWeights) -> None:
    """No K-quant has a packed form of its own: all become int8, twice the size of the file."""
    checkpoint = open_checkpoint(gemma_path)
    need = memory_need(checkpoint, "bf16", policy)
    decode = WeightBuilder(checkpoint, kernel_choice.load(1), "bf16", policy, 64).build(PLENTY).decode
    assert decode is not None
    tensors = [decode.head.data]
    for packed in decode.layers:
        tensors += [part.data for part in (*packed.qkv, packed.o, *packed.gate_up, packed.down)]
    taken = sum(tensor.nbytes for tensor in tensors)
    assert 0.97 * taken < need.decode_bytes < 1.03 * taken
    assert need.temporary_bytes == 4 * 262_144 * 640


def test_load_whole_model(smollm2_path: Path) -> None:
    loaded = load_model(smollm2_path, num_blocks=20, threads=1, model_id="smol")
    assert loaded.info.model_id == "smol"
    assert loaded.info.weights_resident == "bf16+int8+q4"
    assert loaded.info.max_context_tokens == 20 * 32
    assert loaded.runtime.kv_spec.fingerprint == loaded.info.fingerprint
    assert loaded.tokenizer.encode("hi")
    assert loaded.chat_template is not None
    loaded.close()
    with pytest.raises(ConfigError):
        load_model(smollm2_path, kv_bytes=1000, threads=1)
    with pytest.raises(Overloaded):
        load_model(smollm2_path, num_blocks=1 << 40, threads=1)


def test_free_memory_respects_a_container(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 10 kB\nMemAvailable:    2048 kB\n")
    assert free_memory_bytes(tmp_path / "meminfo", tmp_path) == 2 * 1024**2
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert free_memory_bytes(tmp_path / "meminfo", tmp_path) == 600
    (tmp_path / "memory.stat").write_text("anon 50\ninactive_file 150\nactive_file 100\n")
    assert free_memory_bytes(tmp_path / "meminfo", tmp_path) == 750
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes(tmp_path / "meminfo", tmp_path) == 2 * 1024**2
