"""The model: which runtime loads it, with which KV tiers, and what it is called."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.config import KVCacheSettings, Settings
from perilune.core import BLOCK_TOKENS, KVPolicy
from perilune.errors import ConfigError
from perilune.runtime.evaluate.length_record import read as read_length
from perilune.service.model import ServedModel

if TYPE_CHECKING:
    from perilune.runtime.hub.pull import ModelFiles
    from perilune.runtime.kv.sizing import TierSettings
    from perilune.runtime.loader import LoadedModel, ModelInfo


def tiered(settings: Settings) -> bool:
    """Some tenant's KV is kept in tiers."""
    return "tiered" in (settings.kv_cache.policy, *settings.kv_cache.tenants.values())


def tier_settings(kv: KVCacheSettings, folder: Path) -> TierSettings | None:
    """What the loader is told of tiers; None where everybody's policy is full. COLD lies in `folder`."""
    from perilune.runtime.kv.sizing import TierSettings

    if "tiered" not in (kv.policy, *kv.tenants.values()):
        return None
    hot = kv.hot_size if kv.warm_compress else kv.hot_size + kv.warm_size
    return TierSettings(hot, spill_bytes=kv.spill if kv.cold_summary else 0, spill_folder=folder)


def load(settings: Settings, files: ModelFiles) -> LoadedModel:
    """The model in memory, run by the runtime that the settings name. Raises as `build` does."""
    return (
        _load_llamacpp(settings, files) if settings.runtime.backend == "llamacpp" else _load_torch(settings, files)
    )


def _load_llamacpp(settings: Settings, files: ModelFiles) -> LoadedModel:
    """Raises `ConfigError` for settings that llama.cpp, which computes with weights as stored, can't follow."""
    from perilune.runtime.llamacpp_loader import load_llamacpp

    for key, value, kept in (
        ("model.dtype", settings.model.dtype, ("bf16",)),
        ("model.decode_weights", settings.model.decode_weights, ("auto", "stored")),
        ("model.lora", settings.model.lora, ("",)),
        ("kv_cache.policy", "tiered" if tiered(settings) else "full", ("full",)),
    ):
        if value not in kept:
            raise ConfigError(
                f"{key} is {value}; llama.cpp computes with the weights as the file stores them.",
                hint=f"Leave {key} at {kept[0] or 'nothing'}, or set runtime.backend to torch.",
                param=key,
            )
    return load_llamacpp(
        files.path, kv_bytes=settings.kv_cache.ram, threads=settings.runtime.threads, model_id=files.card.name
    )


def _load_torch(settings: Settings, files: ModelFiles) -> LoadedModel:
    from perilune.runtime.loader import load_model
    from perilune.runtime.torch_runtime import TorchRuntime

    loaded = load_model(
        files.path,
        dtype=settings.model.dtype,
        decode_weights=settings.model.decode_weights,
        kv_bytes=settings.kv_cache.ram,
        tiers=tier_settings(settings.kv_cache, settings.home),
        threads=settings.runtime.threads,
        model_id=served_name(settings, files),
        lora=Path(settings.model.lora).expanduser() if settings.model.lora else None,
    )
    runtime = loaded.runtime
    if settings.runtime.cache_warmup and isinstance(runtime, TorchRuntime):
        # A restored document is half as late when its pages are there; meanwhile the rest of the start goes on.
        window = runtime.max_context_tokens
        threading.Thread(target=runtime.populate_pool, args=(window,), name="pool", daemon=True).start()
    return loaded


def served_name(settings: Settings, files: ModelFiles) -> str:
    """The model's name, and behind a plus that of the adapter merged into it."""
    name, lora = files.card.name, settings.model.lora
    return f"{name}+{Path(lora).expanduser().resolve().name}" if lora else name


def served_model(settings: Settings, files: ModelFiles, loaded: LoadedModel) -> ServedModel:
    """What requests may call the model, and what is known of it from the catalogue and the file."""
    card, name = files.card, served_name(settings, files)
    aliases = {
        card.name,
        *card.aliases,
        settings.model.path,
        files.path.name,
        files.path.name.removesuffix(".gguf"),
    }
    blocks, tiers = loaded.runtime.num_blocks, loaded.runtime.tiers
    longest = blocks * BLOCK_TOKENS
    if tiers is not None and KVPolicy(settings.kv_cache.policy) is KVPolicy.TIERED:
        longest = tiers.spec.slots * tiers.spec.segment_tokens
    return ServedModel(
        model_id=name,
        window_tokens=min(loaded.info.max_context_tokens, longest),
        licence=card.licence,
        created_at=int(files.path.stat().st_mtime),
        vocab_size=loaded.info.vocab_size,
        aliases=frozenset(aliases - {name}),
        languages=frozenset(card.languages or loaded.info.languages),
        effective=read_length(settings.home, loaded.info.content) if loaded.info.content else None,
        file_bytes=files.size_bytes,
    )


def rates_file(home: Path, info: ModelInfo, threads: int) -> Path:
    """Where the speeds of this model are kept, as these weights, kernels and threads run it."""
    threads = threads or len(os.sched_getaffinity(0))
    setting = f"{info.fingerprint}|{info.weights_resident}|{info.kernels}|{threads}"
    return home / f"rates-{hashlib.sha256(setting.encode()).hexdigest()[:16]}.json"
