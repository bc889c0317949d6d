"""A grammar's text made an automaton by llguidance, under limits: the one place that calls its compiler.

Knows notations and token bytes; doesn't know models, requests or processes. Both the process that tries a grammar
first (grammar_worker.py) and the one that follows it (grammar.py) come here, so that both meet the same limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perilune.core import Grammar, GrammarKind
from perilune.runtime.grammar_reasons import reason

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_LEXER_STATES = 100_000
"""1 to 2 kB each: what one grammar may take of memory."""

_MAX_ROW_ITEMS = 20_000
"""Four for each property that may come next: as many as a schema of 64K characters has. A mask takes 5 ms."""

_WHITESPACE = " ?"
"""Between JSON's parts: a small model would fill an answer with line breaks, which every schema allows."""


class CannotFollow(Exception):
    """A grammar that is none, uses what isn't supported, or is too large. The text says which, in our own
    words."""


@dataclass(frozen=True, slots=True)
class Words:
    """A vocabulary as llguidance wants it (its `TokenizerWrapper`): `tokens` by id, `encode` for forced text."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    stop_ids: Sequence[int]
    encode: Callable[[str], Sequence[int]]
    bos_token_id: int | None = None

    @property
    def eos_token_id(self) -> int:
        return min(self.stop_ids)

    def __call__(self, text: str) -> list[int]:
        return list(self.encode(text))


def vocabulary(words: Words) -> LLTokenizer:
    """Takes half a second."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=sorted(words.stop_ids))


def compiled(known: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """An automaton at the grammar's beginning, its first mask computed. Raises `CannotFollow`.

    The limits bound what following it takes, but not what its intersections and complements take to build: some
    of 100 characters want minutes and gigabytes.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_lexer_states=_MAX_LEXER_STATES, max_items_in_row=_MAX_ROW_ITEMS, verbose_errors=False
    )
    try:
        matcher = LLMatcher(known, _source(grammar), log_level=0, limits=limits)
    except (ValueError, RecursionError) as error:
        raise CannotFollow(reason(grammar.kind, str(error))) from None
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first mask builds most of the lexer: here, not on the engine's thread
    if matcher.is_error():
        raise CannotFollow(reason(grammar.kind, matcher.get_error()))
    return matcher


def _source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.source, overrides={"whitespace_pattern": _WHITESPACE})
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.source)
