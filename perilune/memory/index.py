"""BM25 over posting blobs: scores passages of the documents asked, with statistics of those documents only.

Knows the blobs of `postings` and numpy; nothing of files, tenants or SQL. Because term statistics come from
the searched documents alone, one tenant's text can't move another's ranking, and a ranking doesn't change
when unrelated documents arrive.

Score: Robertson's BM25 with idf = ln(1 + (N - n + 0.5) / (n + 0.5)), plus `NEIGHBOUR_WEIGHT` times the scores
of the passages before and after (an answer often straddles a border).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perilune.errors import IntegrityError
from perilune.memory.postings import HEADER, VERSION, term_hash

K1 = 1.2
B = 0.75
NEIGHBOUR_WEIGHT = 0.2

_Scores = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage by its number in its document (counts from 0)."""

    file_id: str
    number: int
    score: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A posting blob, mapped."""

    hashes: npt.NDArray[np.uint64]
    begins: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.uint16]
    passages: npt.NDArray[np.uint16]
    frequencies: npt.NDArray[np.uint16]

    def postings(self, term: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
        """Passages that hold the term (hash) and how often; empty where none does."""
        at = int(np.searchsorted(self.hashes, np.uint64(term)))
        if at == len(self.hashes) or int(self.hashes[at]) != term:
            return self.passages[:0], self.frequencies[:0]
        low, high = int(self.begins[at]), int(self.begins[at + 1])
        return self.passages[low:high], self.frequencies[low:high]


def read_segment(blob: bytes) -> Segment:
    """Map a blob without copying. Raises `IntegrityError` where its size doesn't fit its header."""
    if len(blob) < HEADER.size:
        raise _damaged()
    version, passages, terms, count = HEADER.unpack_from(blob)
    if version != VERSION or len(blob) != HEADER.size + 8 * terms + 4 * (terms + 1) + 2 * passages + 4 * count:
        raise _damaged()
    at = HEADER.size
    hashes = np.frombuffer(blob, "<u8", terms, at)
    at += 8 * terms
    begins = np.frombuffer(blob, "<u4", terms + 1, at)
    at += 4 * (terms + 1)
    lengths = np.frombuffer(blob, "<u2", passages, at)
    at += 2 * passages
    return Segment(
        hashes,
        begins,
        lengths,
        np.frombuffer(blob, "<u2", count, at),
        np.frombuffer(blob, "<u2", count, at + 2 * count),
    )


def cut(segment: Segment, low: int, high: int) -> bytes:
    """The blob of passages `low`:`high` of a segment alone, numbered from 0."""
    inside = (segment.passages >= low) & (segment.passages < high)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(inside)])[segment.begins]
    kept = np.diff(before) > 0
    count = int(before[-1])
    begins = np.concatenate([before[:-1][kept], [count]]).astype("<u4")
    passages = (segment.passages[inside] - low).astype("<u2")
    head = HEADER.pack(VERSION, high - low, int(kept.sum()), count)
    parts = (segment.hashes[kept], begins, segment.lengths[low:high], passages, segment.frequencies[inside])
    return head + b"".join(part.tobytes() for part in parts)


def _damaged() -> IntegrityError:
    return IntegrityError("A part of the search index is damaged.", hint="Delete the document and upload it again.")


def rank(documents: Mapping[str, Sequence[Segment]], terms: Sequence[str], limit: int) -> list[Hit]:
    """The best passages, best first; ties go to the earlier one. Empty where no term occurs.

    `documents` maps a file id to its segments in order; passages are numbered through a document's segments.
    """
    lengths = [np.concatenate([s.lengths for s in segments]) for segments in documents.values() if segments]
    total = sum(len(each) for each in lengths)
    if total == 0 or limit <= 0:
        return []
    mean_length = max(1.0, sum(float(each.sum(dtype=np.int64)) for each in lengths) / total)
    hits: list[Hit] = []
    hashed = [term_hash(term) for term in dict.fromkeys(terms)]
    weights = _weights(documents, hashed, total)
    for file_id, segments in documents.items():
        if segments:
            own = np.concatenate([_score(segment, weights, mean_length) for segment in segments])
            hits.extend(_best(file_id, own, limit))
    hits.sort(key=lambda hit: -hit.score)  # stable: equal scores keep the order of files and passages
    return hits[:limit]


def _weights(documents: Mapping[str, Sequence[Segment]], hashed: Sequence[int], total: int) -> dict[int, float]:
    """Inverse document frequency of every term that occurs."""
    weights: dict[int, float] = {}
    for term in hashed:
        holders = sum(len(s.postings(term)[0]) for segments in documents.values() for s in segments)
        if holders:
            weights[term] = math.log(1 + (total - holders + 0.5) / (holders + 0.5))
    return weights


def _score(segment: Segment, weights: Mapping[int, float], mean_length: float) -> _Scores:
    scores = np.zeros(len(segment.lengths), np.float32)
    norms = K1 * (1 - B + B * segment.lengths.astype(np.float32) / np.float32(mean_length))
    for term, weight in weights.items():
        which, often = segment.postings(term)
        frequency = often.astype(np.float32)
        scores[which] += np.float32(weight * (K1 + 1)) * frequency / (frequency + norms[which])
    return scores


def _best(file_id: str, own: _Scores, limit: int) -> list[Hit]:
    """The document's best passages that hold a term themselves, with their neighbours' share added."""
    scores = own.copy()
    scores[1:] += NEIGHBOUR_WEIGHT * own[:-1]
    scores[:-1] += NEIGHBOUR_WEIGHT * own[1:]
    found = np.flatnonzero(own > 0)
    order = found[np.argsort(-scores[found], kind="stable")][:limit]
    return [Hit(file_id, int(number), float(scores[number])) for number in order]
