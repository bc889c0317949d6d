"""LoRA adapters: a PEFT folder, and a checkpoint whose matrices have one merged in.

Knows PEFT's files (`adapter_config.json`, `adapter_model.safetensors`; names as its `LoraModel` saves them) and the
merge W + s·B·A (Hu et al. 2021, arXiv 2106.09685; s = alpha / r, or alpha / √r with rsLoRA, arXiv 2312.03732).
Merging happens once, in fp32, when a matrix is read for packing, so a merged model runs at the speed of its base.
What can't be merged into plain matrices is refused: nothing of an adapter is left out silently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from perilune.errors import UnsupportedModel
from perilune.runtime.checkpoint import Checkpoint, matrix_shape
from perilune.runtime.safetensors_file import read_json
from perilune.runtime.stored import StoredTensor

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_MODULES = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_TEXT_MODEL = r"(?:model\.|language_model\.model\.|model\.language_model\.)?"  # not a vision tower's layers
_LAYER_MODULE = re.compile(rf"^{_TEXT_MODEL}layers\.(\d+)\.([\w.]+)$")
_WHOLE = {
    "head": re.compile(r"^(?:language_model\.)?lm_head$"),
    "embed": re.compile(rf"^{_TEXT_MODEL}embed_tokens$"),
}
_WEIGHT = re.compile(r"^(.+?)\.(?:lora_(A|B)\.weight|lora_embedding_(A|B)|((?:modules_to_save\.)?weight))$")
_BASE_CHANGING_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
_SAVED_BASE = ".base_layer"  # PEFT saves the embeddings that it adapts, too
# Settings of PEFT's LoraConfig that make an adapter more than W + s·B·A, with the name people know them by.
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "biases of LoRA matrices",
    "layer_replication": "layer replication",
    "trainable_token_indices": "trained token rows",
    "target_parameters": "LoRA of bare parameters",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "use_bdlora": "block-diagonal LoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}

Place = tuple[str, int | None]
"""A checkpoint's matrix: part and layer."""


@dataclass(frozen=True, slots=True)
class Change:
    """What an adapter does to one matrix [rows, cols]: `weight + scale * b @ a`; a `replacement` is the new weight.

    `a` fp32 [r, cols] and `b` fp32 [rows, r] come together; `replacement` fp32 [rows, cols].
    """

    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 0.0
    replacement: torch.Tensor | None = None

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """Of the matrices that it makes; more than one shape can't be right."""
        made = set() if self.replacement is None else {tuple(self.replacement.shape)}
        return made if self.a is None or self.b is None else made | {(self.b.shape[0], self.a.shape[1])}

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, cols], merged."""
        base = weight if self.replacement is None else self.replacement
        if self.a is None or self.b is None:
            return base
        return torch.addmm(base, self.b, self.a, alpha=self.scale)


class LoraAdapter:
    """An opened PEFT folder. Raises `UnsupportedModel` for whatever can't be merged exactly, saying why."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir() or not (path / CONFIG_FILE).is_file():
            what = "doesn't exist" if not path.exists() else f"has no {CONFIG_FILE}"
            raise UnsupportedModel(f"LoRA adapter {path.name} {what}.", hint="Give a folder that PEFT has saved.")
        self._config = read_json(path / CONFIG_FILE)
        _refuse_other_methods(self._config)
        self.changes: dict[Place, Change] = self._read()

    @property
    def files(self) -> tuple[Path, ...]:
        return self.path / CONFIG_FILE, self.path / WEIGHTS_FILE

    def _read(self) -> dict[Place, Change]:
        halves: dict[tuple[Place, str], dict[str, torch.Tensor]] = {}
        found: dict[Place, Change] = {}
        for name, tensor in _tensors(self.path):
            match = _WEIGHT.match(name.removeprefix("base_model.model."))
            if match is None:
                raise UnsupportedModel(
                    f"The LoRA adapter holds {name}, which can't be merged.",
                    hint="Supported: LoRA A and B of linear modules, and whole lm_head or embed_tokens.",
                )
            module, half, embedding_half, _ = match.groups()
            module = module.removesuffix(_SAVED_BASE)
            place = _place(module)
            if half is None and embedding_half is None:
                found[place] = Change(replacement=tensor)
            else:
                halves.setdefault((place, module), {})[half or f"embedding {embedding_half}"] = tensor
        for (place, module), pair in halves.items():
            change = self._change(module, pair)
            found[place] = replace(change, replacement=found[place].replacement) if place in found else change
        if not found:
            raise UnsupportedModel(f"LoRA adapter {self.path.name} is empty.", hint="Save it again with PEFT.")
        return found

    def _change(self, module: str, pair: Mapping[str, torch.Tensor]) -> Change:
        a, b = pair.get("A"), pair.get("B")
        if a is None and b is None:  # of an embedding [vocab, hidden]: A is [r, vocab], B is [hidden, r]
            b_t, a_t = pair.get("embedding A"), pair.get("embedding B")
            a, b = (None if half is None else half.T for half in (a_t, b_t))
        if a is None or b is None:
            raise UnsupportedModel(f"The LoRA adapter has only half of {module}.", hint="Save it again with PEFT.")
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            raise UnsupportedModel(
                f"A and B of {module} are {list(a.shape)} and {list(b.shape)}, which don't multiply.",
                hint="Only linear modules can be merged; save the adapter again with PEFT.",
            )
        return Change(a.contiguous(), b.contiguous(), self._scale(module, a.shape[0]))

    def _scale(self, module: str, rank: int) -> float:
        expected = _pattern(self._config.get("rank_pattern"), module, self._config.get("r"))
        if rank != expected:
            raise UnsupportedModel(
                f"The LoRA matrices of {module} have rank {rank}; the config says {expected}.",
                hint="The two files of the adapter don't belong together.",
            )
        alpha = _pattern(self._config.get("alpha_pattern"), module, self._config.get("lora_alpha"))
        if not isinstance(alpha, int | float):
            raise UnsupportedModel("The LoRA adapter's config has no lora_alpha.", hint="Save it again with PEFT.")
        return float(alpha) / (math.sqrt(rank) if self._config.get("use_rslora") else rank)


def _refuse_other_methods(config: Mapping[str, Any]) -> None:
    method = str(config.get("peft_type"))
    if method.upper() != "LORA":
        raise UnsupportedModel(f"{method} adapters are not supported.", hint="Supported: LoRA, saved by PEFT.")
    for key, name in _REFUSED.items():
        if config.get(key):
            raise UnsupportedModel(
                f"The adapter uses {name} ({key}), which can't be merged as LoRA.",
                hint="Merge it with PEFT's `merge_and_unload`, save the model, and load that.",
            )
    if config.get("bias", "none") != "none":
        raise UnsupportedModel(
            f"The adapter trains biases (bias={config['bias']!r}), which is not supported.",
            hint="Merge it with PEFT's `merge_and_unload`, save the model, and load that.",
        )
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(_BASE_CHANGING_STARTS):
        raise UnsupportedModel(
            f"The adapter was started by {start}, which changes the base model's own weights.",
            hint="Save it with PEFT's `path_initial_model_for_weight_conversion`, which makes it a plain LoRA.",
        )


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and fp32 values. Pickled adapters are refused: loading one runs code."""
    from safetensors import SafetensorError, safe_open

    file = path / WEIGHTS_FILE
    if not file.is_file():
        raise UnsupportedModel(
            f"LoRA adapter {path.name} has no {WEIGHTS_FILE}.",
            hint="Save it with `safe_serialization=True`; .bin files are not loaded, because they can run code.",
        )
    try:
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                yield name, cast(torch.Tensor, opened.get_tensor(name)).float()
    except (SafetensorError, OSError) as error:
        raise UnsupportedModel(
            f"{WEIGHTS_FILE} can't be loaded: {error}.", hint="The file is cut short or damaged; save it again."
        ) from None


def _place(module: str) -> Place:
    layered = _LAYER_MODULE.match(module)
    if layered is not None and layered[2] in _MODULES:
        return _MODULES[layered[2]], int(layered[1])
    for part, name in _WHOLE.items():
        if name.match(module):
            return part, None
    raise UnsupportedModel(
        f"The LoRA adapter changes {module}, which is not a module of the supported models.",
        hint=f"Supported: {', '.join(name.rpartition('.')[2] for name in _MODULES)}, lm_head, embed_tokens.",
    )


def _pattern(patterns: object, module: str, default: object) -> object:
    """PEFT's `rank_pattern` and `alpha_pattern`: the value of the first key that matches a module's name or end."""
    for key, value in patterns.items() if isinstance(patterns, dict) else ():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error:
            raise UnsupportedModel(
                f"The LoRA config's pattern {key!r} is not a regular expression.", hint="Save it again with PEFT."
            ) from None
    return default


class MergedCheckpoint(Checkpoint):
    """A checkpoint with an adapter merged in; merged matrices are stored as F32, the rest as in the base.

    Raises `UnsupportedModel` when the base lacks a matrix that the adapter changes, or it has another shape.
    """

    def __init__(self, base: Checkpoint, adapter: LoraAdapter) -> None:
        self.config = base.config
        self._base = base
        self._adapter = adapter
        for place, change in adapter.changes.items():
            self._check(place, change)

    def optional(self, part: str, layer: int | None = None) -> StoredTensor | None:
        stored = self._base.optional(part, layer)
        change = self._adapter.changes.get((part, layer))
        if stored is None or change is None:
            return stored
        merged = change.apply(stored.float32()).contiguous()
        return StoredTensor(stored.name, "F32", stored.rows, stored.cols, merged.view(torch.uint8).numpy())

    def kind(self, part: str, layer: int | None = None) -> str:
        return "F32" if (part, layer) in self._adapter.changes else self._base.kind(part, layer)

    @property
    def files(self) -> tuple[Path, ...]:
        return (*self._base.files, *self._adapter.files)

    def close(self) -> None:
        self._base.close()

    def _check(self, place: Place, change: Change) -> None:
        part, layer = place
        if layer is None and self.config.tied_head:
            name = "lm_head" if part == "head" else "embed_tokens"
            raise UnsupportedModel(
                f"The LoRA adapter changes {name}, and the base model has one matrix for both ends.",
                hint="Merge it with PEFT's `merge_and_unload`, save the model, and load that.",
            )
        if layer is not None and layer >= self.config.num_layers:
            raise UnsupportedModel(
                f"The LoRA adapter changes layer {layer}; the base model has {self.config.num_layers} layers.",
                hint="The adapter was made for another model; its config names which (base_model_name_or_path).",
            )
        expected = matrix_shape(self.config, part)
        for wrong in change.shapes - {expected}:
            where = "" if layer is None else f" of layer {layer}"
            raise UnsupportedModel(
                f"The LoRA adapter changes {part}{where} as {' × '.join(map(str, wrong))}; "
                f"the base model's is {expected[0]} × {expected[1]}.",
                hint="The adapter was made for another model; its config names which (base_model_name_or_path).",
            )
