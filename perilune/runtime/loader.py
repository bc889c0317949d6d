"""From a path to a running model: the one entry for everything that serves or inspects one.

Knows the order of things: open, check that it fits, build weights, allocate KV, fingerprint. Every part has its own
module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from perilune import kernels as kernel_choice
from perilune.core import BLOCK_TOKENS
from perilune.errors import ConfigError, Overloaded
from perilune.kernels.interface import Kernels
from perilune.kernels.reference import ReferenceKernels
from perilune.runtime.chat_template import JinjaChatTemplate, load_chat_template
from perilune.runtime.checkpoint import FolderCheckpoint, GGUFCheckpoint, open_checkpoint
from perilune.runtime.kv.spec import KVSpec
from perilune.runtime.memory import free_memory_bytes
from perilune.runtime.tokenizer import ModelTokenizer, load_tokenizer
from perilune.runtime.torch_runtime import TorchRuntime
from perilune.runtime.weights import DecodeWeights, MemoryNeed, Precision, WeightBuilder, memory_need

_GIB = 1024**3
MAX_DEFAULT_KV_BYTES = 4 * _GIB
_SAMPLES, _SAMPLE_BYTES, _ENDS_BYTES = 64, 16 * 1024, 1024**2


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model is. `languages` are the codes its file names, empty when it names none."""

    model_id: str
    architecture: str
    max_context_tokens: int
    vocab_size: int
    parameters: int
    fingerprint: str
    languages: tuple[str, ...]
    weights_resident: str
    kernels: str


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve. `chat_template` is None for a base model."""

    runtime: TorchRuntime
    tokenizer: ModelTokenizer
    chat_template: JinjaChatTemplate | None
    info: ModelInfo

    def close(self) -> None:
        self.runtime.close()


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What metadata alone says of a model: nothing was loaded. `kv_token_bytes` is KV for one token of context."""

    model_id: str
    architecture: str
    max_context_tokens: int
    parameters: int
    languages: tuple[str, ...]
    has_chat_template: bool
    stored_bytes: int
    need: MemoryNeed
    kv_token_bytes: int


def describe_model(
    path: Path, *, dtype: Precision = "bf16", decode_weights: DecodeWeights = "auto"
) -> ModelDescription:
    """Read metadata and predict memory. Raises `UnsupportedModel`."""
    checkpoint = open_checkpoint(path)
    try:
        config = checkpoint.config
        spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, dtype, "")
        return ModelDescription(
            model_id=model_id_of(path),
            architecture=config.architecture,
            max_context_tokens=config.max_context_tokens,
            parameters=config.parameters,
            languages=_languages(checkpoint),
            has_chat_template=load_chat_template(checkpoint) is not None,
            stored_bytes=checkpoint.stored_bytes(),
            need=memory_need(checkpoint, dtype, decode_weights),
            kv_token_bytes=spec.token_bytes,
        )
    finally:
        checkpoint.close()


def load_model(
    path: Path,
    *,
    dtype: Precision = "bf16",
    decode_weights: DecodeWeights = "auto",
    num_blocks: int | None = None,
    kv_bytes: int = 0,
    threads: int = 0,
    model_id: str | None = None,
    kernels: Kernels | None = None,
) -> LoadedModel:
    """Load a model and allocate its KV: `num_blocks`, else `kv_bytes` worth, else a quarter of free memory.

    `threads` 0 is every core this process may use; it sets PyTorch's thread count.

    Raises `UnsupportedModel` for what can't be run, `Overloaded` for what doesn't fit.
    """
    if threads:
        torch.set_num_threads(threads)
    if kernels is None:
        fp32 = dtype == "fp32"
        kernels = ReferenceKernels("fp32 mode") if fp32 else kernel_choice.load(torch.get_num_threads())
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, dtype, "")
    free = free_memory_bytes()
    blocks = _block_count(spec, num_blocks, kv_bytes, free)
    max_positions = min(config.max_context_tokens, blocks * BLOCK_TOKENS)
    builder = WeightBuilder(checkpoint, kernels, dtype, decode_weights, max_positions)
    weights = builder.build(free - blocks * spec.block_bytes)
    fingerprint = model_fingerprint(checkpoint, dtype)
    runtime = TorchRuntime(weights, kernels, num_blocks=blocks, fingerprint=fingerprint)
    tokenizer = load_tokenizer(checkpoint)
    template = load_chat_template(checkpoint)
    languages = _languages(checkpoint)
    checkpoint.close()
    info = ModelInfo(
        model_id=model_id or model_id_of(path),
        architecture=config.architecture,
        max_context_tokens=runtime.max_context_tokens,
        vocab_size=config.vocab_size,
        parameters=config.parameters,
        fingerprint=fingerprint,
        languages=languages,
        weights_resident=weights.resident,
        kernels=kernels.describe(),
    )
    return LoadedModel(runtime, tokenizer, template, info)


def model_id_of(path: Path) -> str:
    """A file's or folder's name, without `.gguf`."""
    return path.resolve().name.removesuffix(".gguf")


def model_fingerprint(checkpoint: GGUFCheckpoint | FolderCheckpoint, dtype: Precision) -> str:
    """A hex name for weights, config and precision: what KV bytes depend on (spec D5).

    Reads sizes, both ends and 64 samples of each file, so that it takes milliseconds: metadata stand at the front,
    and different weights differ everywhere.
    """
    digest = hashlib.sha256(f"{checkpoint.config}|{dtype}".encode())
    for file in checkpoint.files:
        size = file.stat().st_size
        digest.update(f"{file.name}|{size}".encode() if len(checkpoint.files) > 1 else str(size).encode())
        with file.open("rb") as handle:
            digest.update(handle.read(_ENDS_BYTES))
            for index in range(_SAMPLES):
                handle.seek(size * index // _SAMPLES)
                digest.update(handle.read(_SAMPLE_BYTES))
            handle.seek(max(0, size - _ENDS_BYTES))
            digest.update(handle.read(_ENDS_BYTES))
    return digest.hexdigest()


def _block_count(spec: KVSpec, num_blocks: int | None, kv_bytes: int, free_bytes: int) -> int:
    budget = kv_bytes or min(free_bytes // 4, MAX_DEFAULT_KV_BYTES)
    blocks = num_blocks if num_blocks is not None else budget // spec.block_bytes
    if blocks < 1:
        raise ConfigError(
            f"{budget} bytes of KV hold no block; one of this model's is {spec.block_bytes} bytes.",
            hint="Raise kv_cache.ram.",
            param="kv_cache.ram",
        )
    if blocks * spec.block_bytes > free_bytes:
        raise Overloaded(
            f"The KV pool needs {blocks * spec.block_bytes // 1024**2} MiB; {free_bytes // 1024**2} MiB are free.",
            hint="Lower kv_cache.ram or free memory.",
        )
    return blocks


def _languages(checkpoint: GGUFCheckpoint | FolderCheckpoint) -> tuple[str, ...]:
    languages: Sequence[str] = ()
    if isinstance(checkpoint, GGUFCheckpoint):
        languages = checkpoint.file.strings("general.languages")
    return tuple(languages)
