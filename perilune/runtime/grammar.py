"""Output of a given form: which tokens may come next, so that the whole answer parses (spec S1).

Knows grammars and the model's vocabulary; doesn't know logits' arithmetic (sampler.py) or dialects. The automata
are llguidance's (github.com/guidance-ai/llguidance): JSON Schema, regular expressions and Lark grammars in linear
time, without backtracking. Compiled grammars are kept, because callers ask for the same few forms again and again;
one that is new is tried in a process of its own first (grammar_trial.py).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perilune.core import Grammar, GrammarKind, SamplingParams
from perilune.errors import InvalidRequest
from perilune.runtime.grammar_source import CannotFollow, Words, compiled, vocabulary
from perilune.runtime.grammar_trial import GrammarTrial

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from perilune.runtime.tokenizer import ModelTokenizer

MAX_SOURCE_CHARS = 64 * 1024
"""A schema of so many characters, all of it properties, takes about a second to compile."""

KEPT_GRAMMARS = 64
_OF_TOOLS = "tools"
_NAMES = {
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.LARK: "grammar",
}


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
    """Grammars over one model's vocabulary. Thread-safe; compiling takes milliseconds, the first a second.

    A grammar that wasn't seen before is tried in another process first. `close` when it is no longer needed.
    """

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tools: tuple[GrammarTrial, LLTokenizer] | None = None
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock, self._tools_lock = threading.Lock(), threading.Lock()

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

    def close(self) -> None:
        """End the process that tries grammars."""
        with self._tools_lock:
            if self._tools is not None:
                self._tools[0].close()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if len(grammar.source) > MAX_SOURCE_CHARS:
            raise _refused(grammar, f"it has {len(grammar.source):,} characters, more than {MAX_SOURCE_CHARS:,}")
        if not self._tokenizer.stop_ids:
            raise _refused(grammar, "the model has no token that ends an answer")
        trial, known = self._made()
        try:
            trial.check(grammar)
            return compiled(known, grammar)
        except CannotFollow as error:
            raise _refused(grammar, str(error)) from None

    def _made(self) -> tuple[GrammarTrial, LLTokenizer]:
        with self._tools_lock:
            if self._tools is None:
                words = _words_of(self._tokenizer)
                self._tools = GrammarTrial(words), vocabulary(words)
            return self._tools


def _words_of(tokenizer: ModelTokenizer) -> Words:
    return Words(
        tokens=[tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)],
        special_token_ids=sorted(tokenizer.special_ids),
        stop_ids=sorted(tokenizer.stop_ids),
        encode=tokenizer.encode,
    )


def _refused(grammar: Grammar, reason: str) -> InvalidRequest:
    name = _NAMES[grammar.kind]
    if grammar.param == _OF_TOOLS:  # its text is ours, made of the schemas: a line in it says nothing to the caller
        name, reason = "schema of a tool", reason.partition(" (line ")[0]
    return InvalidRequest(
        f"The {name} can't be followed: {reason}.",
        hint="Change that, or leave the form out. docs/api.md says which forms are supported.",
        param=grammar.param,
    )


def constraint_of(sampling: SamplingParams, compiler: GrammarCompiler | None) -> Constraint | None:
    """What a new sequence must follow. Raises `InvalidRequest` as `GrammarCompiler.constrain`, and without one."""
    if sampling.grammar is None:
        return None
    if compiler is None:
        raise _refused(sampling.grammar, "this runtime was loaded without a tokenizer")
    return compiler.constrain(sampling.grammar)
