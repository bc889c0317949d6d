"""What a model is, in one frozen record, whichever file format it came in.

Knows the keys of GGUF metadata and of Hugging Face's config.json for the architectures we run. Knows no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from perilune.errors import UnsupportedModel
from perilune.kernels.tiers import MAX_HEAD_DIM
from perilune.runtime.gguf_file import GGUFFile

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
"""Names that appear in error messages; SmolLM and most Llama derivatives are `llama`."""

Act = Literal["silu", "gelu_tanh"]
ScalingKind = Literal["linear", "llama3", "yarn"]

_HF_MODEL_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
}
_HF_ACTS: dict[str, Act] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Hub configs may leave out what their class defaults to (transformers' configuration_*.py).
_HF_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": False},
    "qwen2": {"max_position_embeddings": 32768, "tie_word_embeddings": False},
    "qwen3": {"head_dim": 128, "max_position_embeddings": 32768, "tie_word_embeddings": False},
    "gemma3": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
    },
}
_GEMMA_LOCAL_BASE = 10_000.0
_GEMMA_PATTERN = 6  # every sixth layer is global


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched past the first training length.

    Sources: linear, arXiv 2306.15595; yarn, arXiv 2309.00071; llama3, Llama 3.1's published code.
    `attention_factor` None means yarn's own 0.1 ln(factor) + 1.
    """

    kind: ScalingKind
    factor: float
    original_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding. `divisors` (head_dim / 2 numbers) divide the frequencies where a file lists them."""

    base: float
    scaling: RopeScaling | None = None
    divisors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. `windows[i]` is layer i's sliding window in tokens, None for full attention.

    `norm_offset` is added to stored norm weights at load. `local_rope` serves the sliding layers where they have
    their own. `post_norms`: norms on the outputs of attention and feed-forward too.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_tokens: int
    norm_eps: float
    act: Act
    attention_scale: float
    embed_scale: float
    tied_head: bool
    qk_norm: bool
    post_norms: bool
    norm_offset: float
    windows: tuple[int | None, ...]
    rope: Rope
    local_rope: Rope | None = None

    @property
    def q_columns(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_columns(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's linears."""
        attention = self.hidden_size * (2 * self.q_columns + 2 * self.kv_columns)
        return attention + 3 * self.hidden_size * self.ffn_size

    @property
    def parameters(self) -> int:
        """Weights of all linears and embeddings (norms and biases are too few to count)."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        return self.num_layers * self.layer_parameters + embeddings

    def rope_of(self, layer: int) -> Rope:
        if self.windows[layer] is not None and self.local_rope is not None:
            return self.local_rope
        return self.rope


def unsupported_architecture(name: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"The model's architecture {name!r} is not supported.",
        hint=f"Supported: {', '.join(ARCHITECTURES)} (GGUF or safetensors).",
    )


def checked(config: ModelConfig) -> ModelConfig:
    """The config, or `UnsupportedModel` where its numbers can't be a model that we run."""
    sizes = (
        config.vocab_size,
        config.hidden_size,
        config.ffn_size,
        config.num_layers,
        config.num_q_heads,
        config.num_kv_heads,
        config.head_dim,
        config.max_context_tokens,
    )
    if any(not 0 < size < 1 << 31 for size in sizes):
        raise UnsupportedModel("The model's sizes are impossible.", hint="Download the model again.")
    if config.num_q_heads % config.num_kv_heads:
        raise UnsupportedModel(
            f"{config.num_q_heads} query heads can't share {config.num_kv_heads} key heads.",
            hint="Download the model again.",
        )
    if config.head_dim % 16 or config.head_dim > MAX_HEAD_DIM:
        raise UnsupportedModel(
            f"Heads of {config.head_dim} dimensions are not supported.",
            hint=f"Supported: multiples of 16 up to {MAX_HEAD_DIM}.",
        )
    return config


# ------------------------------------------------------------------------------------------------------ GGUF


def from_gguf(file: GGUFFile, rope_divisors: Sequence[float] | None) -> ModelConfig:
    """Read GGUF metadata. `rope_divisors` are the numbers of the tensor `rope_freqs.weight`, if the file has it.

    Raises `UnsupportedModel` for an architecture or a feature we don't run, and for missing keys.
    """
    arch = file.text("general.architecture")
    if arch not in ("llama", "qwen2", "qwen3", "gemma3"):
        raise unsupported_architecture(arch)
    if file.integer(f"{arch}.expert_count", 0):
        raise unsupported_architecture(f"{arch} with experts")
    hidden = file.integer(f"{arch}.embedding_length")
    heads = file.integer(f"{arch}.attention.head_count")
    if heads <= 0:
        raise UnsupportedModel("The model's sizes are impossible.", hint="Download the model again.")
    head_dim = file.integer(f"{arch}.attention.key_length", hidden // heads)
    if file.integer(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel("Partly rotated heads are not supported.", hint="Choose another model.")
    layers = file.integer(f"{arch}.block_count")
    if not 0 < layers < 4096 or "token_embd.weight" not in file.tensors:
        raise UnsupportedModel("The model has no layers or no embeddings.", hint="Download the model again.")
    gemma = arch == "gemma3"
    scaling = _gguf_scaling(file, arch)
    context = file.integer(f"{arch}.context_length")
    return checked(
        ModelConfig(
            architecture=arch,
            vocab_size=file.tensors["token_embd.weight"].shape[0],
            hidden_size=hidden,
            ffn_size=file.integer(f"{arch}.feed_forward_length"),
            num_layers=layers,
            num_q_heads=heads,
            num_kv_heads=file.integer(f"{arch}.attention.head_count_kv", heads),
            head_dim=head_dim,
            max_context_tokens=_stretched(context, scaling),
            norm_eps=file.number(f"{arch}.attention.layer_norm_rms_epsilon"),
            act="gelu_tanh" if gemma else "silu",
            # Gemma 3's 27B scales by its hidden size per head, which the file doesn't say (llama.cpp: gemma3.cpp).
            attention_scale=(hidden / heads if gemma and layers == 62 else head_dim) ** -0.5,
            embed_scale=math.sqrt(hidden) if gemma else 1.0,
            tied_head="output.weight" not in file.tensors,
            qk_norm=arch in ("qwen3", "gemma3"),
            post_norms=gemma,
            norm_offset=0.0,  # llama.cpp's converter has added gemma's 1 already
            windows=_gemma_windows(
                layers,
                file.integer("gemma3.attention.sliding_window"),
                file.integer("gemma3.attention.sliding_window_pattern", _GEMMA_PATTERN),
            )
            if gemma
            else (None,) * layers,
            rope=Rope(
                file.number(f"{arch}.rope.freq_base", 1e6 if gemma else 10_000.0),
                scaling,
                tuple(rope_divisors) if rope_divisors is not None else None,
            ),
            local_rope=Rope(file.number("gemma3.rope.freq_base_swa", _GEMMA_LOCAL_BASE)) if gemma else None,
        )
    )


def _gguf_scaling(file: GGUFFile, arch: str) -> RopeScaling | None:
    kind = file.text(f"{arch}.rope.scaling.type", "none")
    factor = file.number(f"{arch}.rope.scaling.factor", file.number(f"{arch}.rope.scale_linear", 1.0))
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind != "yarn":
        raise _unsupported_scaling(kind)
    extra = file.number(f"{arch}.rope.scaling.attn_factor", 1.0)
    return RopeScaling(
        "yarn",
        factor,
        original_tokens=file.integer(f"{arch}.rope.scaling.original_context_length"),
        beta_fast=file.number(f"{arch}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=file.number(f"{arch}.rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=extra * (0.1 * math.log(factor) + 1.0),
    )


def _gemma_windows(layers: int, window: int, pattern: int) -> tuple[int | None, ...]:
    return tuple(window if (index + 1) % pattern else None for index in range(layers))


def _unsupported_scaling(kind: object) -> UnsupportedModel:
    return UnsupportedModel(
        f"Rope scaling {kind!r} is not supported.", hint="Supported: none, linear, llama3, yarn."
    )


def _stretched(context: int, scaling: RopeScaling | None) -> int:
    if scaling is not None and scaling.kind == "yarn":
        return max(context, int(scaling.factor * scaling.original_tokens))
    return context


# ---------------------------------------------------------------------------------------------- Hugging Face


class _Reader:
    """Typed access to one config object, with the class's defaults below it."""

    def __init__(self, arch: str, data: Mapping[str, Any]) -> None:
        self._data = {**_HF_DEFAULTS[arch], **{key: value for key, value in data.items() if value is not None}}

    def get(self, key: str) -> Any:
        return self._data.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnsupportedModel(f"config.json lacks the number {key}.", hint="Download the model folder again.")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedModel(f"config.json: {key} is not a number.", hint="Download it again.")
        return float(value)


def from_hf(data: Mapping[str, Any], *, has_head: bool) -> ModelConfig:
    """Read config.json. `has_head`: the weights have a separate output head.

    Raises `UnsupportedModel` for an architecture or a feature we don't run, and for missing keys.
    """
    model_type = str(data.get("model_type"))
    arch = _HF_MODEL_TYPES.get(model_type)
    if arch is None:
        raise unsupported_architecture(model_type)
    text = data.get("text_config") if isinstance(data.get("text_config"), dict) else data
    read = _Reader(arch, text if isinstance(text, dict) else data)
    _refuse_unknown_features(read)
    gemma = arch == "gemma3"
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    head_dim = read.integer("head_dim", hidden // max(heads, 1))
    layers = read.integer("num_hidden_layers")
    rope, local_rope = _hf_ropes(arch, read)
    scalar = read.number("query_pre_attn_scalar", head_dim) if gemma else head_dim
    return checked(
        ModelConfig(
            architecture=arch,
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden,
            ffn_size=read.integer("intermediate_size"),
            num_layers=layers,
            num_q_heads=heads,
            num_kv_heads=read.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            max_context_tokens=_stretched(read.integer("max_position_embeddings"), rope.scaling),
            norm_eps=read.number("rms_norm_eps", 1e-6),
            act=_hf_act(read, gemma),
            attention_scale=scalar**-0.5,
            embed_scale=math.sqrt(hidden) if gemma else 1.0,
            tied_head=bool(read.get("tie_word_embeddings")) or not has_head,
            qk_norm=arch in ("qwen3", "gemma3"),
            post_norms=gemma,
            norm_offset=1.0 if gemma else 0.0,
            windows=_hf_windows(arch, read, layers),
            rope=rope,
            local_rope=local_rope,
        )
    )


def _hf_act(read: _Reader, gemma: bool) -> Act:
    name = str(
        read.get("hidden_activation" if gemma else "hidden_act") or ("gelu_pytorch_tanh" if gemma else "silu")
    )
    if name not in _HF_ACTS:
        raise UnsupportedModel(f"Activation {name!r} is not supported.", hint=f"Supported: {', '.join(_HF_ACTS)}.")
    return _HF_ACTS[name]


def _refuse_unknown_features(read: _Reader) -> None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention", "mlp_bias"):
        if read.get(key):
            raise UnsupportedModel(f"The model uses {key}, which is not supported.", hint="Choose another model.")


def _hf_windows(arch: str, read: _Reader, layers: int) -> tuple[int | None, ...]:
    window = read.get("sliding_window")
    if arch in ("qwen2", "qwen3") and not read.get("use_sliding_window"):
        window = None
    if not isinstance(window, int):
        return (None,) * layers
    kinds = read.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if arch == "gemma3":
        return _gemma_windows(layers, window, read.integer("sliding_window_pattern", _GEMMA_PATTERN))
    if arch in ("qwen2", "qwen3"):
        first = read.integer("max_window_layers", 28)
        return tuple(window if index >= first else None for index in range(layers))
    return (window,) * layers if arch == "mistral" else (None,) * layers


def _hf_ropes(arch: str, read: _Reader) -> tuple[Rope, Rope | None]:
    params = read.get("rope_parameters")
    if not isinstance(params, dict):
        params = dict(read.get("rope_scaling") or {})
        params["rope_theta"] = read.get("rope_theta")
    if arch != "gemma3":
        return _hf_rope(params, 10_000.0, read), None
    local_base = read.number("rope_local_base_freq", _GEMMA_LOCAL_BASE)
    if "full_attention" in params:
        local = _hf_rope(params.get("sliding_attention") or {}, local_base, read)
        return _hf_rope(params.get("full_attention") or {}, 1e6, read), local
    return _hf_rope(params, 1e6, read), Rope(local_base)


def _hf_rope(params: Mapping[str, Any], default_base: float, read: _Reader) -> Rope:
    base = float(params.get("rope_theta") or default_base)
    kind = params.get("rope_type") or params.get("type") or "default"
    if float(params.get("partial_rotary_factor") or read.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel("Partly rotated heads are not supported.", hint="Choose another model.")
    if kind == "default":
        return Rope(base)
    if kind not in ("linear", "llama3", "yarn"):
        raise _unsupported_scaling(kind)
    known = cast("ScalingKind", kind)
    context = read.integer("max_position_embeddings")
    original = int(params.get("original_max_position_embeddings") or context)
    return Rope(
        base,
        RopeScaling(
            kind=known,
            factor=float(params.get("factor") or context / original),
            original_tokens=original,
            low_freq_factor=float(params.get("low_freq_factor") or 1.0),
            high_freq_factor=float(params.get("high_freq_factor") or 4.0),
            beta_fast=float(params.get("beta_fast") or 32.0),
            beta_slow=float(params.get("beta_slow") or 1.0),
            attention_factor=_yarn_attention(params),
            truncate=bool(params.get("truncate", True)),
        ),
    )


def _yarn_attention(params: Mapping[str, Any]) -> float | None:
    """Yarn's factor on cos and sin where a config names it or its two scales."""
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    scale, scale_all = params.get("mscale"), params.get("mscale_all_dim")
    factor = float(params.get("factor") or 1.0)
    if scale and scale_all and factor > 1:
        return float((0.1 * scale * math.log(factor) + 1.0) / (0.1 * scale_all * math.log(factor) + 1.0))
    return None
