"""LoRA adapters merged at load give the logits that PEFT gives, for every family and for GGUF bases."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import peft
import pytest
import safetensors.torch
import torch

from perilune.errors import UnsupportedModel
from perilune.kernels import select as kernel_choice
from perilune.kernels.reference import ReferenceKernels
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.loader import describe_model, load_model, model_fingerprint
from perilune.runtime.lora import LoraAdapter, MergedCheckpoint
from perilune.runtime.weights import WeightBuilder, memory_need
from tests.runtime.families import FAMILIES, divergence, make_model, start
from tests.runtime.gguf_models import write_gguf
from tests.runtime.test_logits import prompts, reference_logits

EXACT = ReferenceKernels("oracle tests")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PLENTY = 1 << 40

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft")


def adapt(model: Any, folder: Path, **options: Any) -> Any:
    """The model under a random adapter, which PEFT saves to `folder`."""
    torch.manual_seed(11)
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 12, "target_modules": ALL, "init_lora_weights": False, **options}
    )
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(folder)
    return adapted


def check(base: Path, adapter: Path, plain: torch.Tensor, adapted: Any) -> None:
    parts = prompts(320)
    expected = reference_logits(adapted, parts)
    assert divergence(plain, expected) > 0.01, "an adapter that does nothing can't be tested"
    ours = start(base, EXACT, lora=adapter).prefill(parts)
    torch.testing.assert_close(ours, expected, atol=5e-4, rtol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_peft(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "base")
    plain = reference_logits(model, prompts(320))
    check(tmp_path / "base", tmp_path / "lora", plain, adapt(model, tmp_path / "lora"))


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
        {"rank_pattern": {"q_proj": 8, "layers.1.mlp.down_proj": 2}, "alpha_pattern": {"q_proj": 3}},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["k_proj", "embed_tokens"]},
        {"target_modules": ["up_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["rslora", "one layer", "patterns", "head", "embeddings", "whole head"],
)
def test_options_equal_peft(options: dict[str, Any], tmp_path: Path) -> None:
    model = make_model("llama-untied", tmp_path / "base")
    plain = reference_logits(model, prompts(320))
    adapted = adapt(model, tmp_path / "lora", **options)
    if "modules_to_save" in options:
        with torch.no_grad():
            adapted.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.3)
        adapted.save_pretrained(tmp_path / "lora")
    check(tmp_path / "base", tmp_path / "lora", plain, adapted)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize(("family", "arch"), [("llama-untied", "llama"), ("qwen3-qk-norm", "qwen3")])
def test_gguf_bases_equal_peft(kind: str, family: str, arch: str, tmp_path: Path) -> None:
    """llama.cpp's row order is undone before merging; the adapter lies on what the file holds."""
    model = make_model(family, tmp_path / "hf")
    base = write_gguf(tmp_path / "base.gguf", model, arch, gguf.GGMLQuantizationType[kind])
    plain = reference_logits(model, prompts(320))
    check(base, tmp_path / "lora", plain, adapt(model, tmp_path / "lora"))


def test_the_packed_decode_step_runs_merged_weights(tmp_path: Path) -> None:
    model = make_model("llama-untied", tmp_path / "hf")
    base = write_gguf(tmp_path / "base.gguf", model, "llama", gguf.GGMLQuantizationType.Q8_0)
    adapted = adapt(model, tmp_path / "lora", target_modules=["q_proj", "down_proj"])
    parts = prompts(320, (40, 70))
    expected = reference_logits(adapted, [[*part, 5] for part in parts])
    running = start(base, kernel_choice.load(1), precision="bf16", policy="bf16", lora=tmp_path / "lora")
    running.prefill(parts)
    assert divergence(expected, running.decode([5, 5], [40, 70])) < 0.01


def test_kv_of_the_base_is_never_taken_for_the_merged_models(tmp_path: Path) -> None:
    model = make_model("llama-untied", tmp_path / "base")
    adapt(model, tmp_path / "lora")
    shutil.copytree(tmp_path / "lora", tmp_path / "tuned")
    file = tmp_path / "tuned" / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    first = next(iter(tensors))
    tensors[first][0, 0] += 0.01
    safetensors.torch.save_file(tensors, file)
    rescaled = shutil.copytree(tmp_path / "lora", tmp_path / "rescaled")
    _edit(rescaled, lora_alpha=13)
    base = open_checkpoint(tmp_path / "base")
    names = set()
    for folder in (None, "lora", "tuned", "rescaled"):
        checkpoint = base if folder is None else MergedCheckpoint(base, LoraAdapter(tmp_path / folder))
        weights = WeightBuilder(checkpoint, EXACT, "bf16", "auto", 64).build(PLENTY)
        names.add(model_fingerprint(checkpoint, weights, EXACT))
    assert len(names) == 4


def test_memory_is_predicted_for_what_merging_makes_of_a_matrix(tmp_path: Path) -> None:
    model = make_model("llama-untied", tmp_path / "hf")
    base = write_gguf(tmp_path / "base.gguf", model, "llama", gguf.GGMLQuantizationType.Q4_0)
    adapt(model, tmp_path / "lora", target_modules=["down_proj"])
    plain = memory_need(open_checkpoint(base), "bf16", "auto")
    merged = MergedCheckpoint(open_checkpoint(base), LoraAdapter(tmp_path / "lora"))
    changed = 3 * 64 * 96  # three layers' down matrices: 20 bytes per 32 weights become 34
    assert memory_need(merged, "bf16", "auto").decode_bytes == plain.decode_bytes + changed // 32 * 14
    built = WeightBuilder(merged, EXACT, "bf16", "auto", 64).build(PLENTY)
    assert built.decode is not None
    assert [layer.down.kind for layer in built.decode.layers] == ["int8"] * 3
    assert [layer.o.kind for layer in built.decode.layers] == ["q4"] * 3
    assert describe_model(base, lora=tmp_path / "lora").need.decode_bytes > plain.decode_bytes


# ------------------------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and an adapter for it."""
    folder = tmp_path_factory.mktemp("lora")
    adapt(make_model("llama-untied", folder / "base"), folder / "adapter")
    return folder / "base", folder / "adapter"


@pytest.fixture
def copied(saved: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copytree(saved[1], tmp_path / "copy")


def _edit(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer replication"),
        ({"r": 5}, "rank 4; the config says 5"),
        ({"lora_alpha": None}, "no lora_alpha"),
        ({"alpha_pattern": {"q_proj(": 3}}, "regular expression"),
    ],
)
def test_other_methods_are_refused(changes: dict[str, Any], says: str, copied: Path) -> None:
    _edit(copied, **changes)
    with pytest.raises(UnsupportedModel, match=says) as raised:
        LoraAdapter(copied)
    assert raised.value.hint


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        (Q + ".lora_magnitude_vector", (64,), "lora_magnitude_vector"),
        ("base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight", (4, 64), "qkv_proj"),
        ("base_model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight", (4, 64), "vision_tower"),
        ("base_model.model.model.norm.weight", (64,), "model.norm"),
        (Q + ".lora_A.weight", (4, 4, 64), "don't multiply"),
        (Q + ".lora_A.weight", None, "only half"),
    ],
)
def test_what_can_not_be_merged_is_named(name: str, shape: tuple[int, ...] | None, says: str, copied: Path) -> None:
    file = copied / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(UnsupportedModel, match=says):
        LoraAdapter(copied)


def test_folders_that_are_no_adapters_are_refused(saved: tuple[Path, Path], copied: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="doesn't exist"):
        LoraAdapter(tmp_path / "nowhere")
    with pytest.raises(UnsupportedModel, match=r"no adapter_config\.json"):
        LoraAdapter(saved[0])
    weights = copied / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    with pytest.raises(UnsupportedModel, match="can't be loaded"):
        LoraAdapter(copied)
    weights.rename(copied / "adapter_model.bin")
    with pytest.raises(UnsupportedModel, match=r"has no adapter_model\.safetensors") as raised:
        LoraAdapter(copied)
    assert "run code" in raised.value.hint


def test_an_adapter_of_another_model_is_refused(saved: tuple[Path, Path], tmp_path: Path) -> None:
    adapter = LoraAdapter(saved[1])
    other = open_checkpoint(saved[0])
    for changes, says in (({"num_layers": 2}, "has 2 layers"), ({"ffn_size": 128}, "128")):
        other.config = _changed(open_checkpoint(saved[0]).config, changes)
        with pytest.raises(UnsupportedModel, match=says):
            MergedCheckpoint(other, adapter)


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    import copy

    changed = copy.copy(config)
    for key, value in changes.items():
        object.__setattr__(changed, key, value)
    return changed


def test_a_tied_models_ends_are_refused(tmp_path: Path) -> None:
    model = make_model("llama-tied-llama3", tmp_path / "base")
    adapt(model, tmp_path / "lora", target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(UnsupportedModel, match="one matrix for both ends"):
        MergedCheckpoint(open_checkpoint(tmp_path / "base"), LoraAdapter(tmp_path / "lora"))


def test_the_loader_refuses_before_it_allocates(saved: tuple[Path, Path], copied: Path) -> None:
    _edit(copied, use_dora=True)
    with pytest.raises(UnsupportedModel, match="DoRA"):
        load_model(saved[0], num_blocks=4, lora=copied)
    with pytest.raises(UnsupportedModel, match="DoRA"):
        describe_model(saved[0], lora=copied)
