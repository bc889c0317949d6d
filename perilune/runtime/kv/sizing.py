"""How a budget of RAM and disk is shared out between blocks, summaries and payloads of closed segments.

Arithmetic over sizes; allocates nothing. Source of the shares: a segment's summaries are a twelfth of its payload
(INT8), so an eighth of the segments' RAM describes about one and a half times what the rest of it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perilune.errors import ConfigError
from perilune.kernels.tiers import SEGMENT_TOKENS, SINK_TOKENS, SegmentLayout
from perilune.runtime.kv.spec import KVSpec
from perilune.runtime.kv.tiers import TierSize

SEGMENT_SHARE = 0.5
"""Of KV RAM, for closed segments; blocks get the rest."""

SUMMARY_SHARE = 0.25
"""Most of the segments' RAM that summaries may take, so that COLD segments don't crowd out WARM ones."""

_LEAST_WARM = 2


@dataclass(frozen=True, slots=True)
class TierSettings:
    """What an operator says of tiers. `ram_bytes` 0: `SEGMENT_SHARE` of KV RAM; `spill_bytes` 0: no COLD tier."""

    hot_tokens: int = SEGMENT_TOKENS
    ram_bytes: int = 0
    spill_bytes: int = 0
    spill_folder: Path | None = None


def tier_size(layout: SegmentLayout, tiered_layers: int, hot_tokens: int, settings: TierSettings) -> TierSize:
    """Slots and frames that fit `settings` (with its `ram_bytes` set). Raises `ConfigError` if too few do."""
    records = tiered_layers * layout.num_kv_heads
    summary, payload = records * layout.summary_bytes, records * layout.payload_bytes
    ram = settings.ram_bytes
    spill = settings.spill_bytes if settings.spill_folder is not None else 0
    cold = min(spill // payload, int(SUMMARY_SHARE * ram) // summary)
    warm = (ram - cold * summary) // (summary + payload)
    if warm < _LEAST_WARM:
        raise ConfigError(
            f"{ram // 1024**2} MiB of RAM hold no {_LEAST_WARM} closed segments; one of this model's takes "
            f"{(summary + payload) // 1024**2} MiB.",
            hint="Raise kv_cache.ram, or set kv_cache.policy to full.",
            param="kv_cache.ram",
        )
    return TierSize(cold + warm, warm, cold, settings.spill_folder, hot_tokens)


def hot_tokens(windows: tuple[int | None, ...], asked: int) -> int:
    """Whole segments that cover `asked` and every layer's own sliding window."""
    widest = max((window for window in windows if window is not None), default=0)
    return -(-max(asked, widest, 1) // SEGMENT_TOKENS) * SEGMENT_TOKENS


def least_blocks(spec: KVSpec, hot: int) -> int:
    """Blocks that one long tiered sequence needs: sinks, hot zone, the open segment and a block to decode into."""
    return spec.blocks_for(SINK_TOKENS + hot + SEGMENT_TOKENS) + 1
