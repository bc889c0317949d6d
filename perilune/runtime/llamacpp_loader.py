"""From a GGUF file to a model that llama.cpp runs: `loader.load_model` for `runtime.backend: llamacpp`.

Tokenizer and chat template are ours, from the same file, so that prompts are built the same way whatever computes
them. Knows no tensors: weights are llama.cpp's business.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from perilune.errors import Overloaded, UnsupportedModel
from perilune.runtime.chat_template import load_chat_template
from perilune.runtime.checkpoint import GGUFCheckpoint, open_checkpoint
from perilune.runtime.grammar import GrammarCompiler
from perilune.runtime.kv.spec import KVDtype, KVSpec
from perilune.runtime.llamacpp import LlamaCppRuntime
from perilune.runtime.llamacpp_library import describe_llama_cpp
from perilune.runtime.loader import (
    LoadedModel,
    ModelInfo,
    block_count,
    content_hash,
    content_name,
    languages_of,
    model_id_of,
)
from perilune.runtime.memory import free_memory_bytes
from perilune.runtime.tokenizer import load_tokenizer

CACHE_DTYPE: KVDtype = "f16"


def load_llamacpp(
    path: Path,
    *,
    num_blocks: int | None = None,
    kv_bytes: int = 0,
    threads: int = 0,
    model_id: str | None = None,
) -> LoadedModel:
    """Load a GGUF file into llama.cpp; arguments as of `loader.load_model`.

    Raises `ConfigError` without llama-cpp-python, `UnsupportedModel` for anything but a GGUF file of an
    architecture that we have a tokenizer for, `Overloaded` for what doesn't fit.
    """
    software = describe_llama_cpp()
    checkpoint = open_checkpoint(path)
    try:
        if not isinstance(checkpoint, GGUFCheckpoint):
            raise UnsupportedModel(
                f"{path.name} is a safetensors folder; llama.cpp reads GGUF files.",
                hint="Set runtime.backend to torch.",
            )
        config, file = checkpoint.config, checkpoint.file.path
        spec = _spec(checkpoint, software)
        blocks = block_count(spec, num_blocks, kv_bytes, _free_bytes(checkpoint))
        tokenizer = load_tokenizer(checkpoint)
        grammars = GrammarCompiler(tokenizer)
        runtime = LlamaCppRuntime(
            file,
            spec,
            num_blocks=blocks,
            max_context_tokens=config.max_context_tokens,
            threads=threads,
            grammars=grammars,
        )
        info = ModelInfo(
            model_id=model_id or model_id_of(path),
            architecture=config.architecture,
            max_context_tokens=runtime.max_context_tokens,
            vocab_size=runtime.vocab_size,
            parameters=config.parameters,
            fingerprint=spec.fingerprint,
            languages=languages_of(checkpoint),
            weights_resident="gguf",
            kernels=software,
            content=content_name(checkpoint),
        )
        return LoadedModel(runtime, tokenizer, load_chat_template(checkpoint), info, grammars)
    finally:
        checkpoint.close()


def _spec(checkpoint: GGUFCheckpoint, software: str) -> KVSpec:
    config = checkpoint.config
    facts = f"{software}|{CACHE_DTYPE}|{content_hash(checkpoint.file.path)}"
    fingerprint = hashlib.sha256(facts.encode()).hexdigest()
    return KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, CACHE_DTYPE, fingerprint)


def _free_bytes(checkpoint: GGUFCheckpoint) -> int:
    """What is left for KV beside the weights, which llama.cpp maps and partly repacks."""
    stored, free = checkpoint.stored_bytes(), free_memory_bytes()
    if stored >= free:
        raise Overloaded(
            f"The weights need {stored // 1024**2} MiB; {free // 1024**2} MiB are free.",
            hint="Use a smaller model or free memory.",
        )
    return free - stored
