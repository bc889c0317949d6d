"""Shapes are read from the model; where its config and its weights disagree, it doesn't start (spec R11)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from perilune.errors import UnsupportedModel
from perilune.runtime.loader import load_model
from tests.runtime.families import SIZES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    place = tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(place)
    return place


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 4),
        ("num_attention_heads", 8),
        ("head_dim", 32),
        ("hidden_size", 128),
        ("intermediate_size", 64),
        ("num_hidden_layers", 4),
        ("vocab_size", 352),
    ],
)
def test_a_config_that_disagrees_with_the_weights_stops_the_start(
    folder: Path, tmp_path: Path, key: str, value: int
) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    config = json.loads((model / "config.json").read_text())
    config[key] = value
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel) as error:
        load_model(model, num_blocks=8, threads=1)
    assert error.value.hint
