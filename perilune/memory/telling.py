"""How an entry tells something: as done, or as a plan, a wish, a price. Ordinary words of English and Chinese.

Knows writing, no event and no question. Who asks which of two things came first means things that happened; the
entry nearest by meaning is often the one that spoke of them before ("we book the boat for 14 June").
"""

from __future__ import annotations

import math
import re
from typing import Final

_PLAN = re.compile(
    r"[?？]|\b(?:will|would|going to|plan|planned|book|booked|order|ordered|want|wants|wanted|need|needs|must|"
    r"should|next|tomorrow|cost|costs|price|quote|offer|deposit|appointment|maybe|if|until|deadline|not|no|"
    r"never|don't|didn't|nearly|almost)\b|要|想|打算|计划|准备|预约|订|报价|下周|下个?月|明天|如果|也许|可能|差点|没|别|不|多少|费|元|欧",
    re.I,
)
_DONE = re.compile(
    r"\b(?:is (?:done|in|out|up|back|here|born|finished|gone|open|closed|over)|are (?:in|up|back|done)|has|have|"
    r"was|were|finally|today|yesterday|came|got|went|done|\w{1,40}ed)\b|了|完|终于|好了|回来|过",
    re.I,
)
_MAX_CHARS = 1_000
_FEW_DIGITS = 2

SIGNS: Final = 4


def signs(text: str) -> tuple[float, float, float, float]:
    """(speaks of a plan, tells something done, has many digits, length on a logarithmic scale)."""
    text = text[:_MAX_CHARS]
    digits = sum(character.isdigit() for character in text)
    return (
        float(_PLAN.search(text) is not None),
        float(_DONE.search(text) is not None),
        float(digits > _FEW_DIGITS),
        math.log1p(len(text)),
    )
