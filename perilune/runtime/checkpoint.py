"""An opened model: its config, and its tensors under one set of names whichever format they came in.

Knows how GGUF and Hugging Face name and order weights (llama.cpp permutes Llama's query and key rows; here they are
put back, so that every model rotates halves). Knows nothing of precision or memory.

Names: `embed`, `final_norm`, `head`, and per layer `input_norm q k v o q_norm k_norm post_attn_norm ffn_norm gate
up down post_ffn_norm`, biases with `_bias` behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from perilune.errors import UnsupportedModel
from perilune.runtime.gguf_file import GGUFFile, is_gguf
from perilune.runtime.model_config import ModelConfig, from_gguf, from_hf
from perilune.runtime.quantised import PACKED, integer_format
from perilune.runtime.safetensors_file import SafetensorsFolder, is_model_folder
from perilune.runtime.stored import StoredTensor

_GGUF_GLOBAL = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_GGUF_LAYER = {
    "input_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attn_norm": "post_attention_norm",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "post_ffn_norm": "post_ffw_norm",
}
_HF_LAYER = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "post_attn_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
# Gemma norms both branches on both sides, and so reuses one of the names above for another norm.
_HF_GEMMA_LAYER = {
    **_HF_LAYER,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}
_HF_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
BIAS = "_bias"


LAYER_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def matrix_shape(config: ModelConfig, part: str) -> tuple[int, int]:
    """Rows and columns that the config gives a matrix."""
    return {
        "q": (config.q_columns, config.hidden_size),
        "k": (config.kv_columns, config.hidden_size),
        "v": (config.kv_columns, config.hidden_size),
        "o": (config.hidden_size, config.q_columns),
        "gate": (config.ffn_size, config.hidden_size),
        "up": (config.ffn_size, config.hidden_size),
        "down": (config.hidden_size, config.ffn_size),
        "embed": (config.vocab_size, config.hidden_size),
        "head": (config.vocab_size, config.hidden_size),
    }[part]


class Checkpoint(ABC):
    """Base of both formats. `tensor` and `optional` give weights as stored; norms come with `norm`."""

    config: ModelConfig

    def tensor(self, part: str, layer: int | None = None) -> StoredTensor:
        """Raises `UnsupportedModel` when the model lacks it or stores it in a way we can't read."""
        found = self.optional(part, layer)
        if found is None:
            where = "" if layer is None else f" of layer {layer}"
            raise UnsupportedModel(f"The model lacks the weight {part}{where}.", hint="Download it again.")
        return found

    @abstractmethod
    def optional(self, part: str, layer: int | None = None) -> StoredTensor | None:
        """None when the model lacks it."""

    @property
    @abstractmethod
    def files(self) -> tuple[Path, ...]:
        """The files whose bytes are the model."""

    def kind(self, part: str, layer: int | None = None) -> str:
        """The number format in which a matrix is stored, from metadata. Here: plain floats."""
        return "BF16"

    def matrices(self) -> Iterator[tuple[str, int | None]]:
        """Part and layer of every matrix; a head that is the embeddings once."""
        yield "embed", None
        if not self.config.tied_head:
            yield "head", None
        for layer in range(self.config.num_layers):
            for part in LAYER_MATRICES:
                yield part, layer

    def stored_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @abstractmethod
    def close(self) -> None:
        """Release the files."""


class GGUFCheckpoint(Checkpoint):
    def __init__(self, path: Path) -> None:
        self.file = GGUFFile(path)
        divisors = None
        if "rope_freqs.weight" in self.file.tensors:
            divisors = self.file.tensor("rope_freqs.weight").vector().tolist()
        self.config = from_gguf(self.file, divisors)

    def optional(self, part: str, layer: int | None = None) -> StoredTensor | None:
        name, stem = _gguf_name(part, layer), part.removesuffix(BIAS)
        if name not in self.file.tensors:
            return None
        found = self.file.tensor(name)
        if self.config.architecture == "llama" and stem in ("q", "k"):
            return self._halves_first(found, self.config.num_q_heads if stem == "q" else self.config.num_kv_heads)
        return found

    def kind(self, part: str, layer: int | None = None) -> str:
        found = self.file.tensors.get(_gguf_name(part, layer))
        return "BF16" if found is None else found.kind

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file.path,)

    def close(self) -> None:
        self.file.close()

    def _halves_first(self, stored: StoredTensor, heads: int) -> StoredTensor:
        """Undo llama.cpp's row order, which rotates neighbouring pairs (convert_hf_to_gguf.py, `permute`)."""
        if stored.rows == 1:  # a bias: its numbers are the rows
            values = stored.float32().reshape(-1)[_unpermuted(stored.cols, heads)].numpy()
            return StoredTensor(stored.name, "F32", 1, stored.cols, values.view(np.uint8).reshape(1, -1))
        return stored.take_rows(_unpermuted(stored.rows, heads))


def _gguf_name(part: str, layer: int | None) -> str:
    suffix = ".bias" if part.endswith(BIAS) else ".weight"
    return _GGUF_GLOBAL[part] if layer is None else f"blk.{layer}.{_GGUF_LAYER[part.removesuffix(BIAS)]}{suffix}"


def _unpermuted(rows: int, heads: int) -> NDArray[np.int64]:
    if rows % (2 * heads):
        raise UnsupportedModel(
            "The model's query or key weights don't divide into heads.", hint="Download it again."
        )
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


class FolderCheckpoint(Checkpoint):
    def __init__(self, path: Path) -> None:
        self.folder = SafetensorsFolder(path)
        names = set(self.folder.names)
        prefix = next((p for p in _HF_PREFIXES if f"{p}embed_tokens.weight" in names), None)
        if prefix is None:
            raise UnsupportedModel("The model folder has no token embeddings.", hint="Download it again.")
        self._prefix = prefix
        self._names = names
        packing = self.folder.config.get("quantization_config")
        self._packing = integer_format(packing) if isinstance(packing, dict) else None
        self._head = prefix.removesuffix("model.") + "lm_head.weight"
        if self._head not in names:
            self._head = "lm_head.weight"
        self.config = from_hf(self.folder.config, has_head=self._head in names)
        self._layer_names = _HF_GEMMA_LAYER if self.config.post_norms else _HF_LAYER

    def optional(self, part: str, layer: int | None = None) -> StoredTensor | None:
        stem = part.removesuffix(BIAS)
        suffix = ".bias" if part.endswith(BIAS) else ".weight"
        if layer is not None:
            name = f"{self._prefix}layers.{layer}.{self._layer_names[stem]}{suffix}"
        else:
            stems = {"embed": "embed_tokens.weight", "final_norm": "norm.weight"}
            name = self._head if part == "head" else self._prefix + stems[part]
        if name in self._names:
            return self.folder.tensor(name)
        module = name.removesuffix("weight")
        if self._packing is None or module + PACKED not in self._names:
            return None
        values = self._packing.dequantise(name, lambda last: self.folder.value(module + last))
        rows, cols = values.shape
        return StoredTensor(name, "F32", rows, cols, values.view(torch.uint8).numpy())

    @property
    def files(self) -> tuple[Path, ...]:
        return self.folder.files

    def close(self) -> None:
        self.folder.close()


def open_checkpoint(path: Path) -> GGUFCheckpoint | FolderCheckpoint:
    """Open a GGUF file, a folder that holds one, or a safetensors folder.

    Raises `UnsupportedModel` for anything else, saying what is supported.
    """
    if path.is_dir() and not is_model_folder(path):
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            path = files[0]
    if is_model_folder(path):
        return FolderCheckpoint(path)
    if path.is_file() and (path.suffix == ".gguf" or is_gguf(path)):
        return GGUFCheckpoint(path)
    what = "doesn't exist" if not path.exists() else "is neither a GGUF file nor a safetensors folder"
    raise UnsupportedModel(
        f"{path.name} {what}.", hint="Supported: .gguf files, and folders with config.json and *.safetensors."
    )
