"""Token ids of real English text for the benches: every reading gets text that no engine has seen in this run.

The text is Python's own language reference as shipped in the standard library (`pydoc_data.topics`, about
0.5 MB), so that a clean clone needs no data.
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path


def text() -> str:
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


class TokenTape:
    """Hands out stretches of one long token stream, each token at most once until the stream ends.

    When it ends it starts again one token later, so that no stretch repeats an earlier one from its first block on.
    """

    def __init__(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise ValueError("the corpus is empty")
        self._token_ids = token_ids
        self._cursor = 0
        self._laps = 0

    @classmethod
    def load(cls, tokenizer_json: Path) -> TokenTape:
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(tokenizer_json)).encode(text(), add_special_tokens=False).ids)

    def take(self, count: int) -> list[int]:
        if count > len(self._token_ids):
            raise ValueError(f"the corpus holds {len(self._token_ids)} tokens, {count} were asked for")
        if self._cursor + count > len(self._token_ids):
            self._laps += 1
            self._cursor = self._laps
            if self._cursor + count > len(self._token_ids):
                raise ValueError("the corpus is used up")
        stretch = self._token_ids[self._cursor : self._cursor + count]
        self._cursor += count
        return stretch
