"""Output of a given form: which tokens may come next, so that the whole answer parses (spec S1).

Knows grammars and the model's vocabulary; doesn't know logits' arithmetic (sampler.py) or dialects. The automata
are llguidance's (github.com/guidance-ai/llguidance): JSON Schema, regular expressions and Lark grammars in linear
time, without backtracking, under the limits below. Compiled grammars are kept, because callers ask for the same few
forms again and again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perilune.core import Grammar, GrammarKind, SamplingParams
from perilune.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from perilune.runtime.tokenizer import ModelTokenizer

MAX_SOURCE_CHARS = 64 * 1024
"""A schema of so many characters, all of it properties, takes about a second to compile."""

KEPT_GRAMMARS = 64

_MAX_LEXER_STATES = 100_000
"""1 to 2 kB each: what one grammar may take of memory."""

_MAX_ROW_ITEMS = 20_000
"""Four for each property that may come next: as many as a schema of `MAX_SOURCE_CHARS` has. A mask takes 5 ms."""

_WHITESPACE = " ?"
"""Between JSON's parts: a small model would fill an answer with line breaks, which every schema allows."""


class Constraint:
    """How far one sequence has come in its grammar. One thread at a time."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = np.zeros((vocab_size + 31) // 32, np.int32)

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """[vocab_size] which tokens may come next; the ends of an answer only where it is complete."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little").view(np.bool_)
        if len(bits) >= vocab_size:
            return bits[:vocab_size]
        return np.pad(bits, (0, vocab_size - len(bits)))  # rows that pad the model's head are no tokens

    def accept(self, token: int) -> None:
        """Go on by one token. Raises `InvalidRequest` if the grammar became too large to follow."""
        if not self._matcher.consume_token(token) or self._matcher.is_error():
            raise InvalidRequest(
                "The form that the answer must have became too complex to follow.",
                hint="Simplify the schema or grammar, or leave it out.",
            )


class GrammarCompiler:
    """Grammars over one model's vocabulary. Thread-safe; compiling takes milliseconds, the first half a second."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock, self._vocabulary_lock = threading.Lock(), threading.Lock()

    def constrain(self, grammar: Grammar) -> Constraint:
        """A constraint at the grammar's beginning.

        Raises `InvalidRequest` for a grammar that is none, or uses what isn't supported, or is too large.
        """
        with self._lock:
            known = self._kept.get(grammar)
            if known is not None:
                self._kept.move_to_end(grammar)
                return Constraint(known.deep_copy(), self._tokenizer.vocab_size)
        matcher = self._compile(grammar)  # outside the lock: the engine's thread mustn't wait for another's grammar
        with self._lock:
            self._kept[grammar] = matcher
            if len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
            return Constraint(matcher.deep_copy(), self._tokenizer.vocab_size)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        if len(grammar.source) > MAX_SOURCE_CHARS:
            raise _refused(grammar, f"it has {len(grammar.source):,} characters, more than {MAX_SOURCE_CHARS:,}")
        limits = LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES, max_items_in_row=_MAX_ROW_ITEMS, verbose_errors=False
        )
        try:
            source = _source(grammar)
            matcher = LLMatcher(self._words(), source, log_level=0, limits=limits)
        except (ValueError, RecursionError) as error:
            raise _refused(grammar, str(error)) from None
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask builds most of the lexer: here, not on the engine's thread
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        return matcher

    def _words(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer)
            return self._vocabulary


class _Words:
    """A vocabulary as llguidance wants it (its `TokenizerWrapper`)."""

    bos_token_id = None

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.stop_ids)
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _vocabulary(tokenizer: ModelTokenizer) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    if not tokenizer.stop_ids:
        raise ValueError("the model has no token that ends an answer")
    words = TokenizerWrapper(_Words(tokenizer))
    return LLTokenizer(words, n_vocab=tokenizer.vocab_size, eos_token=sorted(tokenizer.stop_ids))


def _source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.source, overrides={"whitespace_pattern": _WHITESPACE})
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.source)


def _refused(grammar: Grammar, reason: str) -> InvalidRequest:
    first_line = " ".join(reason.splitlines()[:1])[:300]
    return InvalidRequest(
        f"The {grammar.kind.value.replace('_', ' ')} can't be followed: {first_line}.",
        hint="docs/api.md says which forms are supported.",
        param=grammar.param,
    )


def constraint_of(sampling: SamplingParams, compiler: GrammarCompiler | None) -> Constraint | None:
    """What a new sequence must follow. Raises `InvalidRequest` as `GrammarCompiler.constrain`, and without one."""
    if sampling.grammar is None:
        return None
    if compiler is None:
        raise _refused(sampling.grammar, "this runtime was loaded without a tokenizer")
    return compiler.constrain(sampling.grammar)
