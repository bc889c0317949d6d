"""From a path to a running model: the one entry for everything that serves or inspects one.

Knows the order of things: open, check that it fits, build weights, allocate KV, fingerprint. Every part has its own
module.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from perilune.core import BLOCK_TOKENS
from perilune.errors import ConfigError, Overloaded
from perilune.kernels import select as kernel_choice
from perilune.kernels.interface import Kernels, PackedLinear
from perilune.kernels.reference import ReferenceKernels
from perilune.runtime.chat_template import JinjaChatTemplate, load_chat_template
from perilune.runtime.checkpoint import FolderCheckpoint, GGUFCheckpoint, open_checkpoint
from perilune.runtime.kv.spec import KVSpec
from perilune.runtime.memory import free_memory_bytes
from perilune.runtime.tokenizer import ModelTokenizer, load_tokenizer
from perilune.runtime.torch_runtime import TorchRuntime
from perilune.runtime.weights import (
    DecodeWeights,
    MemoryNeed,
    ModelWeights,
    Precision,
    WeightBuilder,
    memory_need,
)

_GIB = 1024**3
MAX_DEFAULT_KV_BYTES = 4 * _GIB
_HASHED_BYTES = 16 * 1024**2  # at a time


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
    fingerprint = model_fingerprint(checkpoint, weights, kernels)
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


def model_fingerprint(
    checkpoint: GGUFCheckpoint | FolderCheckpoint, weights: ModelWeights, kernels: Kernels
) -> str:
    """A hex name for everything KV bytes depend on (spec D5): every byte of the files, config, precision, which
    copies are resident, and whose arithmetic it is.

    Loading has just read the files, so a whole hash at memory speed (xxh3-128) adds little: it tells a fine-tuned
    tensor from the original. It needn't resist an attacker, who could replace the model itself.
    """
    embed = weights.embed.kind if isinstance(weights.embed, PackedLinear) else weights.precision
    torch_path = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    facts = (checkpoint.config, weights.precision, weights.resident, embed, kernels.level_name, torch_path)
    digest = hashlib.sha256(repr(facts).encode())
    for file in checkpoint.files:
        name = file.name if len(checkpoint.files) > 1 else ""
        digest.update(f"{name}|{_content_hash(file)}".encode())
    return digest.hexdigest()


def _content_hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for start in range(0, len(mapped), _HASHED_BYTES):
            with memoryview(mapped)[start : start + _HASHED_BYTES] as part:
                digest.update(part)
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
