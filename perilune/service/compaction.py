"""What an assistant said and did so far, in few of its own sentences: compaction of OpenAI's Responses.

Knows messages and sentences; doesn't know dialects. Nothing is generated: sentences are chosen as a session's
summary chooses them (`memory.salience`), so that numbers and names can't drift, and it costs no model any time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from perilune.core import Message
from perilune.memory.analyse import Analyser
from perilune.memory.salience import Candidate, choose, cost_of, score, terms_of
from perilune.memory.sentences import sentences

LETTERS = 3_600
"""Of a summary, `salience.cost_of`: some 900 tokens."""

MAX_READ_CHARS = 2**20
"""What is read of the messages, the newest first."""

_CALL_CHARS = 160
_HEADING = "[Earlier answers, in short]\n"


def compacted(messages: Sequence[Message]) -> str:
    """The summary; takes up to a second, so call it in a thread. Users' messages aren't part of it. An earlier
    summary among the messages is summarised with the rest."""
    texts = list(_told(messages))
    analyser = Analyser()
    found: list[tuple[int, int, int, frozenset[int]]] = []
    seen: Counter[int] = Counter()
    for number, text in enumerate(texts):
        for start, end in sentences(text):
            terms = terms_of(text[start:end], analyser)
            found.append((number, start, end, terms))
            seen.update(terms)
    most = math.log(1 + max(seen.values(), default=1))

    def rarity(term: int) -> float:
        return 1.0 - math.log(seen[term]) / most

    candidates = []
    for number, start, end, terms in found:
        sentence = texts[number][start:end]
        worth = score(sentence, terms, False, rarity)
        candidates.append(Candidate(number, start, end, worth, cost_of(sentence), terms))
    chosen = choose(candidates, LETTERS)
    lines = [f"- {texts[each.number][each.start : each.end]}\n" for each in chosen]
    return _HEADING + "".join(lines)


def _told(messages: Sequence[Message]) -> Iterator[str]:
    """What isn't users', as text, in order."""
    left, taken = MAX_READ_CHARS, []
    for message in reversed(messages):
        if message.role in ("assistant", "tool") and left > 0:
            calls = (f"Called {call.name} with {call.arguments[:_CALL_CHARS]}." for call in message.tool_calls)
            said = message.text.removeprefix(_HEADING)
            text = "\n".join([said, *calls] if said else calls)[:left]
            left -= len(text)
            taken.append(text)
    yield from reversed(taken)
