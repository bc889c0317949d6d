"""Drawing the next token from logits.

Knows one sequence's sampling state: its random stream, what it has generated, its penalties, its grammar. A
sequence's draws depend on its own logits and seed only, so a seed gives the same text in any batch.
Arithmetic is numpy, one row at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from perilune.core import SamplingParams, TokenLogprob
from perilune.errors import InternalError, InvalidRequest
from perilune.runtime.grammar import Constraint

Row = NDArray[np.float32]
MAX_LOGPROBS = 20
_NUCLEUS_HEAD = 1024  # candidates sorted before the whole vocabulary is


class SequenceSampler:
    """Sampling state of one sequence. `seed` is used where the parameters name none; `constraint` follows their
    grammar."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        seed: int,
        constraint: Constraint | None = None,
    ) -> None:
        check_sampling(params, vocab_size)
        self._params = params
        self._constraint = constraint
        self._random = np.random.Generator(np.random.PCG64(seed if params.seed is None else params.seed % 2**64))
        self._counts: dict[int, int] = {}
        self._seen: set[int] = set(prompt_ids) if params.repetition_penalty != 1.0 else set()

    @property
    def plain_greedy(self) -> bool:
        """Whether the next token is the largest logit and nothing else is asked."""
        plain = self._params.temperature == 0.0 and not self._adjusts and self._params.logprobs is None
        return plain and self._constraint is None

    @property
    def _adjusts(self) -> bool:
        p = self._params
        penalties = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
        return bool(p.logit_bias or penalties)

    def sample(self, logits: Row) -> tuple[int, TokenLogprob | None]:
        """Draw a token from fp32 logits [vocab], which are left as they are, and remember it."""
        adjusted = self._adjust(logits) if self._adjusts else logits
        if self._constraint is not None:
            adjusted = np.where(self._constraint.allowed(len(logits)), adjusted, np.float32(-np.inf))
        token = int(adjusted.argmax()) if self._params.temperature == 0.0 else self._draw(adjusted)
        self.accept(token, logits)
        return token, self._logprob(logits, token)

    def accept(self, token: int, logits: Row) -> None:
        """Remember a token. Raises `InternalError` when its logit is no number: the model has gone wrong."""
        if not np.isfinite(logits[token]):
            raise InternalError(
                "The model produced numbers that are not finite.", hint="Report this, with the log."
            )
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._adjusts:
            self._counts[token] = self._counts.get(token, 0) + 1
            if self._params.repetition_penalty != 1.0:
                self._seen.add(token)

    def _adjust(self, logits: Row) -> Row:
        """Repetition penalty over prompt and output, presence and frequency over output, then bias."""
        p, out = self._params, logits.copy()
        if self._seen:
            ids = np.fromiter(self._seen, np.int64, len(self._seen))
            values = out[ids]
            out[ids] = np.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        if self._counts and (p.presence_penalty or p.frequency_penalty):
            ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            out[ids] -= np.float32(p.presence_penalty) + np.float32(p.frequency_penalty) * counts
        for token, bias in p.logit_bias:
            out[token] += np.float32(bias)
        return out

    def _draw(self, logits: Row) -> int:
        p = self._params
        scaled = logits.astype(np.float64) / p.temperature
        weights = np.exp(scaled - scaled.max())
        if p.min_p > 0:
            weights[weights < p.min_p] = 0.0  # the likeliest token's weight is 1
        if 0 < p.top_k < len(weights):
            weights[weights < np.partition(weights, -p.top_k)[-p.top_k]] = 0.0
        if p.top_p < 1.0:
            weights = _nucleus(weights, p.top_p)
        edges = np.cumsum(weights)
        token = int(np.searchsorted(edges, self._random.random() * edges[-1], side="right"))
        return min(token, int(np.flatnonzero(weights)[-1]))

    def _logprob(self, logits: Row, token: int) -> TokenLogprob | None:
        """Log probabilities of the model itself, before temperature, penalties and bias."""
        wanted = self._params.logprobs
        if wanted is None:
            return None
        exact = logits.astype(np.float64)
        peak = exact.max()
        total = peak + np.log(np.exp(exact - peak).sum())
        top: tuple[tuple[int, float], ...] = ()
        if wanted:
            ids = np.argpartition(-exact, wanted - 1)[:wanted] if wanted < len(exact) else np.arange(len(exact))
            ranked = sorted(ids.tolist(), key=lambda i: (-exact[i], i))
            top = tuple((int(i), float(exact[i] - total)) for i in ranked)
        return TokenLogprob(token, float(exact[token] - total), top)


def sample_each(
    samplers: Mapping[str, SequenceSampler], rows: Mapping[str, Row]
) -> tuple[dict[str, int], dict[str, TokenLogprob], dict[str, Exception]]:
    """(tokens, log probabilities, faults) of a step's sequences, by id. A fault is one sequence's: its grammar may
    have become too complex, while its neighbours' answers are sound."""
    tokens: dict[str, int] = {}
    logprobs: dict[str, TokenLogprob] = {}
    faults: dict[str, Exception] = {}
    for seq_id, row in rows.items():
        try:
            tokens[seq_id], logprob = samplers[seq_id].sample(row)
        except Exception as error:  # whatever it is, the others go on
            faults[seq_id] = error
            continue
        if logprob is not None:
            logprobs[seq_id] = logprob
    return tokens, logprobs, faults


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.float64]:
    """Keep the fewest likeliest tokens whose share reaches `top_p`, at least one (arXiv 1904.09751)."""
    goal = top_p * weights.sum()
    size = min(_NUCLEUS_HEAD, len(weights))
    ids = np.argpartition(-weights, size - 1)[:size]
    if weights[ids].sum() < goal:
        ids = np.arange(len(weights))
    order = ids[np.lexsort((ids, -weights[ids]))]
    count = int(np.searchsorted(np.cumsum(weights[order]), goal, side="left")) + 1
    kept = np.zeros_like(weights)
    kept[order[:count]] = weights[order[:count]]
    return kept


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises `InvalidRequest` for parameters that this model can't serve, naming the parameter.

    Whoever takes a request in calls it before any work; what reaches the engine unchecked ends there as an error.
    """
    limits = (
        ("temperature", params.temperature, 0.0, 100.0),
        ("top_p", params.top_p, 0.0, 1.0),
        ("min_p", params.min_p, 0.0, 1.0),
        ("presence_penalty", params.presence_penalty, -100.0, 100.0),
        ("frequency_penalty", params.frequency_penalty, -100.0, 100.0),
        ("repetition_penalty", params.repetition_penalty, 0.01, 100.0),
        ("top_k", params.top_k, 0, 2**31),
        ("logprobs", params.logprobs or 0, 0, MAX_LOGPROBS),
    )
    for name, value, low, high in limits:
        if not low <= value <= high:
            raise InvalidRequest(f"{name} is {value}.", hint=f"Use {low} to {high}.", param=name)
    for token, bias in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {token}; the model has {vocab_size}.",
                hint=f"Use ids from 0 to {vocab_size - 1}.",
                param="logit_bias",
            )
        if not np.isfinite(bias):
            raise InvalidRequest("A logit_bias is not finite.", hint="Use -100 to 100.", param="logit_bias")
