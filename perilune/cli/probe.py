"""What only a process that has loaded torch can tell. A child of `perilune doctor`; prints one JSON object.

Loads torch and the kernels as serving would, and reads the model's header; loads no weights.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.config import KVCacheSettings
from perilune.errors import PeriluneError

if TYPE_CHECKING:
    from perilune.runtime.weights import DecodeWeights, Precision


def probe(
    model: Path | None,
    dtype: Precision,
    decode_weights: DecodeWeights,
    lora: Path | None,
    backend: str,
    kv: KVCacheSettings,
) -> dict[str, object]:
    """Facts as JSON values; `kv.ram` is what KV is to take. A model that can't be read, or has no room for tiers,
    gives `model_error` and `model_hint`, a backend that can't be loaded `backend_error`."""
    import torch

    from perilune.kernels.openmp import mapped_runtimes
    from perilune.kernels.select import load

    kernels = load(1)
    found = _backend_facts(backend)  # before OpenMP runtimes are counted
    found |= {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cuda_available": bool(torch.version.cuda) and torch.cuda.is_available(),
        "kernels": kernels.describe(),
        "openmp": mapped_runtimes(),
    }
    if model is not None:
        try:
            found |= _model_facts(model, dtype, decode_weights, lora, kv)
        except PeriluneError as error:
            found |= {"model_error": error.message, "model_hint": error.hint}
    return found


def _backend_facts(backend: str) -> dict[str, object]:
    if backend != "llamacpp":
        return {}
    from perilune.runtime.llamacpp_library import describe_llama_cpp

    try:
        return {"backend": describe_llama_cpp()}
    except PeriluneError as error:
        return {"backend_error": error.message}


def _model_facts(
    model: Path, dtype: Precision, decode_weights: DecodeWeights, lora: Path | None, kv: KVCacheSettings
) -> dict[str, object]:
    from perilune.build.models import tier_settings
    from perilune.runtime.loader import describe_model

    tiers = tier_settings(kv, model.parent)  # sizes alone: nothing is made in the folder
    told = describe_model(
        model, dtype=dtype, decode_weights=decode_weights, lora=lora, kv_bytes=kv.ram, tiers=tiers
    )
    return {
        "tiers": asdict(told.tiers) if told.tiers is not None else None,
        "architecture": told.architecture,
        "window_tokens": told.max_context_tokens,
        "weights_bytes": told.need.total_bytes,
        "prefill_bytes": told.need.one_copy_bytes,
        "kv_token_bytes": told.kv_token_bytes,
        "chat_template": told.has_chat_template,
    }


if __name__ == "__main__":
    path, given_dtype, given_weights, adapter, given_backend, given_kv = sys.argv[1:7]
    # The arguments are values of checked settings.
    facts = probe(
        Path(path) if path else None,
        "fp32" if given_dtype == "fp32" else "bf16",
        json.loads(given_weights),
        Path(adapter).expanduser() if adapter else None,
        given_backend,
        KVCacheSettings.model_validate_json(given_kv),
    )
    print(json.dumps(facts))
