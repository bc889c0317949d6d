"""`perilune eval weights` and `eval length` on a small random model, as a process of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from perilune.runtime.evaluate.length_record import FOLDER
from tests.cli.conftest import Command
from tests.runtime.families import make_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A random Llama whose tokens are bytes."""
    folder = tmp_path / "tiny"
    make_model("llama-untied", folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({sign: index for index, sign in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_weights_prints_a_table_and_the_same_as_json(command: Command, model: Path, tmp_path: Path) -> None:
    text, report = tmp_path / "mine.txt", tmp_path / "report.json"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 30)
    asked = ["eval", "weights", str(text), "-m", str(model), "--length", "300", "--tokens", "600"]
    done = command(
        *asked, "--precision", "int8", "--precision", "lm_head=int8,default=bf16", "--report", str(report)
    )
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    assert [line[0] for line in lines if line] == [
        *("WEIGHTS", "int8", "lm_head=int8,default=bf16"),
        *("WEIGHTS", "int8", "lm_head=int8,default=bf16"),
    ]
    told = json.loads(report.read_text())
    assert (told["tokens"], told["length"], told["text"]["name"]) == (600, 300, "mine.txt")
    all_int8, mixed = (entry["overall"]["kld_mean"]["value"] for entry in told["precisions"])
    assert 0 < mixed < all_int8
    assert (
        json.loads(command(*asked, "--precision", "int8", "--json").out)["precisions"][0] == told["precisions"][0]
    )
    wrong = command(*asked, "--precision", "int3")
    assert wrong.code == 2
    assert "int3" in wrong.err or "int8" in wrong.err


def test_length_keeps_its_grid_in_the_home_folder(command: Command, model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1536}))
    done = command("eval", "length", "-m", str(model), "--trials", "1")
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines()]
    assert rows[0][:3] == ["TASK", "LENGTH", "AT"]
    assert {(row[0], row[1]) for row in rows[1:]} == {
        (task, length) for task in ("passkey", "lookup") for length in ("1,024", "1,536")
    }, "512 bytes have no room for ten facts"
    assert "answers none of these tasks" in done.err
    (kept,) = (tmp_path / FOLDER).iterdir()
    assert len(json.loads(kept.read_text())["cells"]) == 20


def test_heads_need_a_window(command: Command, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1536}))
    refused = command("eval", "heads", "-m", str(model), "--segments", "1")
    assert refused.code == 2
    assert "needs 2296 positions; the model has 1536" in refused.err
    assert not model.with_name("tiny.heads.json").exists()
