"""Named ways to read tiered KV (spec R8), and which one fits a question.

Knows presets and a cheap sign of a document's kind, its name. Knows nothing of kernels' numbers
beyond the policy that they are written in. A wrong guess costs some speed or some fidelity, never an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from perilune.core import KVPolicy
from perilune.kernels.tiers import AttentionPolicy

AUTO = "auto"
"""Not a preset: choose one."""

PEAK = "peak"
"""While more waits than the machine can do (`service.peak`): half of the general one's units, no summaries."""

_CONTRACT = re.compile(
    r"\b(agreement|contract|lease|licen[cs]e|terms (and|of)|nda|hereinafter|whereas)\b|合同|协议|甲方|乙方",
    re.IGNORECASE,
)
_PAPER = re.compile(r"\b(paper|arxiv|preprint|proceedings|journal|thesis|\d{4}\.\d{5})|论文|学报", re.IGNORECASE)


def make(window_tokens: int, units: int, summary_weight: float) -> AttentionPolicy:
    """A policy from the three figures that people set; the budget follows the mass, from half to 4 × `units`."""
    return AttentionPolicy(
        window_tokens=window_tokens,
        topk_units=units,
        min_units=max(1, units // 2),
        max_units=4 * units,
        summary_weight=summary_weight,
    )


def presets(window_tokens: int, units: int, summary_weight: float) -> Mapping[str, AttentionPolicy]:
    """Every preset by name; the arguments are the general one's."""
    return {
        "general": make(window_tokens, units, summary_weight),
        "support": make(512, 32, 0.4),
        "contract": make(1024, 64, 0.7),
        "paper": make(2048, 128, 0.3),
        "rag": make(512, 64, 1.0),
        PEAK: make(window_tokens, max(1, units // 2), 0.0),
    }


def all_full(tenant: str) -> KVPolicy:
    """The policy of a service without tiers."""
    return KVPolicy.FULL


def choose(filenames: Sequence[str], *, refined: bool, turns: int) -> str:
    """The preset of a question over documents with these names.

    `refined`: retrieved passages stand for the documents. `turns` is how many messages the request has."""
    if refined:
        return "rag"
    if not filenames:
        return "support" if turns > 2 else "general"
    signs = " ".join(filenames).replace("_", " ")
    if _CONTRACT.search(signs):
        return "contract"
    return "paper" if _PAPER.search(signs) else "general"
