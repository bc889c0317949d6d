"""From a path to a running model: the one entry for everything that serves or inspects one.

Knows the order of things: open, check that it fits, build weights, allocate KV, fingerprint. Every part has its own
module.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from perilune.core import BLOCK_TOKENS
from perilune.errors import ConfigError, Overloaded
from perilune.kernels import select as kernel_choice
from perilune.kernels.interface import Kernels, PackedLinear
from perilune.kernels.reference import ReferenceKernels
from perilune.kernels.tiers import SEGMENT_TOKENS, SegmentLayout
from perilune.runtime.chat_template import JinjaChatTemplate, load_chat_template
from perilune.runtime.checkpoint import Checkpoint, FolderCheckpoint, GGUFCheckpoint, open_checkpoint
from perilune.runtime.grammar import GrammarCompiler
from perilune.runtime.head_profile import find_profile
from perilune.runtime.kv.sizing import SEGMENT_SHARE, TierSettings, hot_tokens, least_blocks, tier_size
from perilune.runtime.kv.spec import KVSpec
from perilune.runtime.kv.tiers import TierSize
from perilune.runtime.lora import LoraAdapter, MergedCheckpoint
from perilune.runtime.memory import free_memory_bytes
from perilune.runtime.model_config import ModelConfig
from perilune.runtime.mri import ModelRuntime
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
    """What a loaded model is. `languages` are the codes its file names, empty when it names none. `content` names
    its files however they are run (`content_name`). `max_context_tokens` is what its KV here holds of the
    `trained_tokens` that it was made for (0: not known)."""

    model_id: str
    architecture: str
    max_context_tokens: int
    vocab_size: int
    parameters: int
    fingerprint: str
    languages: tuple[str, ...]
    weights_resident: str
    kernels: str
    content: str = ""
    trained_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve. `chat_template` is None for a base model."""

    runtime: ModelRuntime
    tokenizer: ModelTokenizer
    chat_template: JinjaChatTemplate | None
    info: ModelInfo
    grammars: GrammarCompiler

    def close(self) -> None:
        self.grammars.close()
        self.runtime.close()


@dataclass(frozen=True, slots=True)
class TierNeed:
    """What tiers would hold and take: bf16 tokens in blocks, INT8 ones in RAM and on disk, and all their
    summaries, in RAM."""

    block_tokens: int
    warm_tokens: int
    cold_tokens: int
    warm_bytes: int
    cold_bytes: int
    summary_bytes: int


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What metadata alone says of a model: nothing was loaded. `kv_token_bytes` is KV for one token of context;
    `tiers` is None where none were asked for."""

    model_id: str
    architecture: str
    max_context_tokens: int
    parameters: int
    languages: tuple[str, ...]
    has_chat_template: bool
    stored_bytes: int
    need: MemoryNeed
    kv_token_bytes: int
    tiers: TierNeed | None = None


def describe_model(
    path: Path,
    *,
    dtype: Precision = "bf16",
    decode_weights: DecodeWeights = "auto",
    lora: Path | None = None,
    kv_bytes: int = 0,
    tiers: TierSettings | None = None,
) -> ModelDescription:
    """Read metadata and predict memory, with the adapter `lora` where one is named, and `tiers` of `kv_bytes`.

    Raises `UnsupportedModel`, and `ConfigError` where there is no room for tiers.
    """
    checkpoint = open_checkpoint(path)
    try:
        config = checkpoint.config
        merged = with_lora(checkpoint, lora)
        spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, dtype, "")
        return ModelDescription(
            model_id=model_id_of(path),
            architecture=config.architecture,
            max_context_tokens=config.max_context_tokens,
            parameters=config.parameters,
            languages=languages_of(checkpoint),
            has_chat_template=load_chat_template(checkpoint) is not None,
            stored_bytes=merged.stored_bytes(),
            need=memory_need(merged, dtype, decode_weights),
            kv_token_bytes=spec.token_bytes,
            tiers=_tier_need(spec, config, kv_bytes, tiers),
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
    tiers: TierSettings | None = None,
    threads: int = 0,
    model_id: str | None = None,
    kernels: Kernels | None = None,
    lora: Path | None = None,
) -> LoadedModel:
    """Load a model and allocate its KV: `num_blocks`, else `kv_bytes` worth, else a quarter of free memory; with
    `tiers`, half of it for closed segments.

    `threads` 0 is every core this process may use; it sets PyTorch's thread count. `lora` is a PEFT folder.

    Raises `UnsupportedModel` for what can't be run, `Overloaded` for what doesn't fit.
    """
    if threads:
        torch.set_num_threads(threads)
    if kernels is None:
        fp32 = dtype == "fp32"
        kernels = ReferenceKernels("fp32 mode") if fp32 else kernel_choice.load(torch.get_num_threads())
    checkpoint = open_checkpoint(path)
    merged = with_lora(checkpoint, lora)
    config = checkpoint.config
    spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, dtype, "")
    free = free_memory_bytes()
    blocks, size = _kv_sizes(spec, config, num_blocks, kv_bytes, tiers, free)
    longest = max(blocks * BLOCK_TOKENS, size.slots * SEGMENT_TOKENS if size is not None else 0)
    max_positions = min(config.max_context_tokens, longest)
    builder = WeightBuilder(merged, kernels, dtype, decode_weights, max_positions)
    weights = builder.build(free - blocks * spec.block_bytes)
    content = content_name(merged)
    fingerprint = model_fingerprint(merged, weights, kernels, content)
    tokenizer = load_tokenizer(checkpoint)
    grammars = GrammarCompiler(tokenizer)
    # Of the model without the adapter: what its heads look for stays.
    base = content if lora is None else content_name(checkpoint)
    profile = find_profile(path, base, config.num_layers, config.num_kv_heads)
    runtime = TorchRuntime(
        weights,
        kernels,
        num_blocks=blocks,
        fingerprint=fingerprint,
        tiers=size,
        grammars=grammars,
        budgets=None if profile is None else profile.budgets(),
    )
    template = load_chat_template(checkpoint)
    languages = languages_of(checkpoint)
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
        content=content,
        trained_tokens=config.max_context_tokens,
    )
    return LoadedModel(runtime, tokenizer, template, info, grammars)


def model_id_of(path: Path) -> str:
    """A file's or folder's name, without `.gguf`."""
    return path.resolve().name.removesuffix(".gguf")


def with_lora(checkpoint: Checkpoint, lora: Path | None) -> Checkpoint:
    """The checkpoint, with a PEFT folder merged in where one is named."""
    return checkpoint if lora is None else MergedCheckpoint(checkpoint, LoraAdapter(lora))


def model_fingerprint(
    checkpoint: Checkpoint, weights: ModelWeights, kernels: Kernels, content: str | None = None
) -> str:
    """A hex name for everything KV bytes depend on (spec D5): the model (`content_name`, which may be passed in),
    precision, which copies are resident, and whose arithmetic it is."""
    embed = weights.embed.kind if isinstance(weights.embed, PackedLinear) else weights.precision
    torch_path = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    facts = (weights.precision, weights.resident, weights.policy, embed, kernels.level_name, torch_path)
    name = content_name(checkpoint) if content is None else content
    return hashlib.sha256(f"{name}|{facts!r}".encode()).hexdigest()


def content_name(checkpoint: Checkpoint) -> str:
    """A hex name for a model however it is run: its config and every byte of its files, an adapter's too.

    Loading has just read the files, so a whole hash at memory speed (xxh3-128) adds little: it tells a fine-tuned
    tensor from the original. It needn't resist an attacker, who could replace the model itself.
    """
    digest = hashlib.sha256(repr(checkpoint.config).encode())
    for file in checkpoint.files:
        name = file.name if len(checkpoint.files) > 1 else ""
        digest.update(f"{name}|{content_hash(file)}".encode())
    return digest.hexdigest()


def content_hash(path: Path) -> str:
    """xxh3-128 of a file, in hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for start in range(0, len(mapped), _HASHED_BYTES):
            with memoryview(mapped)[start : start + _HASHED_BYTES] as part:
                digest.update(part)
    return digest.hexdigest()


def _kv_sizes(
    spec: KVSpec,
    config: ModelConfig,
    num_blocks: int | None,
    kv_bytes: int,
    tiers: TierSettings | None,
    free_bytes: int,
) -> tuple[int, TierSize | None]:
    """Blocks of KV, and what closed segments get beside them. Raises as `load_model`."""
    budget = kv_bytes or min(free_bytes // 4, MAX_DEFAULT_KV_BYTES)
    size = _tier_size(spec, config, budget, num_blocks, tiers)
    if size is not None and num_blocks is None:
        budget = int(budget * (1 - SEGMENT_SHARE))
    return block_count(spec, num_blocks, budget, free_bytes), size


def _tier_size(
    spec: KVSpec, config: ModelConfig, budget: int, num_blocks: int | None, settings: TierSettings | None
) -> TierSize | None:
    """Slots and frames of closed segments. Raises `ConfigError` where tiers make no sense or have no room."""
    if settings is None:
        return None
    layers = sum(window is None for window in config.windows)
    if not layers:
        raise ConfigError(
            "Every layer of this model attends to a sliding window only: there is nothing to put into tiers.",
            hint="Set kv_cache.policy to full.",
            param="kv_cache.policy",
        )
    hot = hot_tokens(config.windows, settings.hot_tokens)
    blocks = num_blocks if num_blocks is not None else int(budget * (1 - SEGMENT_SHARE)) // spec.block_bytes
    if blocks < least_blocks(spec, hot):
        raise ConfigError(
            f"Tiered KV needs {least_blocks(spec, hot)} blocks for one long sequence; there are {blocks}.",
            hint="Raise kv_cache.ram, or set kv_cache.policy to full.",
            param="kv_cache.ram",
        )
    asked = replace(settings, ram_bytes=settings.ram_bytes or int(budget * SEGMENT_SHARE))
    return tier_size(SegmentLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim), layers, hot, asked)


def _tier_need(spec: KVSpec, config: ModelConfig, budget: int, settings: TierSettings | None) -> TierNeed | None:
    size = _tier_size(spec, config, budget, None, settings)
    if size is None:
        return None
    layout = SegmentLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim)
    records = sum(window is None for window in config.windows) * spec.num_kv_heads
    payload = records * layout.payload_bytes
    return TierNeed(
        block_tokens=int(budget * (1 - SEGMENT_SHARE)) // spec.block_bytes * BLOCK_TOKENS,
        warm_tokens=size.warm_frames * SEGMENT_TOKENS,
        cold_tokens=size.cold_frames * SEGMENT_TOKENS,
        warm_bytes=size.warm_frames * payload,
        cold_bytes=size.cold_frames * payload,
        summary_bytes=size.slots * records * layout.summary_bytes,
    )


def block_count(spec: KVSpec, num_blocks: int | None, kv_bytes: int, free_bytes: int) -> int:
    """Blocks of a pool: `num_blocks`, else `kv_bytes` worth, else a quarter of free memory.

    Raises `ConfigError` if that is none, `Overloaded` if they don't fit.
    """
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


def languages_of(checkpoint: GGUFCheckpoint | FolderCheckpoint) -> tuple[str, ...]:
    """Codes of the languages that a model's file names; empty when it names none."""
    languages: Sequence[str] = ()
    if isinstance(checkpoint, GGUFCheckpoint):
        languages = checkpoint.file.strings("general.languages")
    return tuple(languages)
