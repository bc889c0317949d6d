"""`eval heads` from a model and a text to a profile: how its KV heads share the budget of decode.

Decides on how much text; what is measured and how shares follow is in the modules beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from perilune.errors import InvalidRequest
from perilune.kernels.tiers import SEGMENT_TOKENS
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.evaluate.heads import head_costs
from perilune.runtime.evaluate.heads_share import allocate
from perilune.runtime.evaluate.heads_text import calibration_haystack
from perilune.runtime.evaluate.kv_forward import load_eval_model
from perilune.runtime.evaluate.kv_prefill import open_prefill
from perilune.runtime.evaluate.kv_tasks import Question
from perilune.runtime.evaluate.kv_tiers import Scale, TieredContext
from perilune.runtime.head_profile import HeadProfile
from perilune.runtime.loader import content_name
from perilune.runtime.tokenizer import load_tokenizer

_SEED = 1000
_QUESTION_TOKENS = 120


@dataclass(frozen=True, slots=True)
class HeadsPlan:
    """`mean_units`: units a head on average for which shares are best. `sketch_units`: the units' worth of time and
    bytes of looking up a head's sketches. Both from docs/log.md, 'Heads'."""

    haystacks: int = 4
    segments: int = 3
    mean_units: float = 9.0
    sketch_units: float = 20.0
    window_tokens: int = 128

    @property
    def length(self) -> int:
        return self.segments * SEGMENT_TOKENS + self.window_tokens


def measure_heads(path: Path, text: str, plan: HeadsPlan, say: Callable[[str], None]) -> HeadProfile:
    """Raises `InvalidRequest` where text or the model's window is too short, or the model answers nothing."""
    checkpoint = open_checkpoint(path)
    try:
        tokenizer, content = load_tokenizer(checkpoint), content_name(checkpoint)
        window = checkpoint.config.max_context_tokens
    finally:
        checkpoint.close()
    positions = plan.length + _QUESTION_TOKENS
    if positions > window:
        raise InvalidRequest(
            f"Measuring heads needs {positions} positions; the model has {window}.",
            hint="Ask for fewer --segments.",
        )
    say("loading")
    model, fill, filler = load_eval_model(path, positions), open_prefill(path, positions), tokenizer.encode(text)
    if len(filler) < plan.length:
        raise InvalidRequest(
            f"The text has {len(filler)} tokens; {plan.length} are needed.", hint="Give a longer text."
        )

    def contexts() -> Iterator[tuple[TieredContext, Sequence[Question]]]:
        for number in range(plan.haystacks):
            say(f"haystack {number + 1} of {plan.haystacks}")
            hay = calibration_haystack(
                tokenizer.encode, filler, length=plan.length, seed=_SEED + number, start=tokenizer.bos_ids
            )
            context = fill(torch.tensor(hay.token_ids), plan.length)
            tiered = TieredContext(model, context, Scale(sink_tokens=16))
            tiered.close_to(plan.segments)
            yield tiered, hay.questions

    units, sketched = allocate(head_costs(model, contexts()), plan.mean_units, plan.sketch_units)
    used = units[list(model.tiered_layers)].float()
    shares = (units / used.mean()).tolist()
    return HeadProfile(
        content,
        tuple(tuple(round(share, 3) for share in row) for row in shares),
        tuple(tuple(row) for row in sketched.tolist()),
    )
