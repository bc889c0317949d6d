"""BM25 over the term counts that SQL keeps of every entry, with statistics of the whole tenant.

Knows numbers, not where they come from. One tenant's text can't move another's ranking, and every index gives the
same ranks, because scores come from here and not from it.

An entry's terms are packed as (u64 hash, u16 count) pairs, little-endian, in order of the hash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

K1 = 1.2
B = 0.75
TERM = np.dtype([("hash", "<u8"), ("count", "<u2")])
_MAX_U16 = 65_535

Scores = npt.NDArray[np.float32]


def pack(terms: Mapping[int, int]) -> bytes:
    """Terms (hash -> how often) as bytes."""
    packed = np.empty(len(terms), TERM)
    packed["hash"] = np.fromiter(terms.keys(), np.uint64, len(terms))
    packed["count"] = np.minimum(np.fromiter(terms.values(), np.int64, len(terms)), _MAX_U16)
    packed.sort(order="hash")
    return packed.tobytes()


def unpack(blob: bytes) -> dict[int, int]:
    """The terms that `pack` packed."""
    packed = np.frombuffer(blob, TERM)
    return dict(zip(packed["hash"].tolist(), packed["count"].tolist(), strict=True))


def frequencies(blobs: Sequence[bytes], terms: Sequence[int]) -> Scores:
    """How often each entry (row) holds each term (column)."""
    found = np.zeros((len(blobs), len(terms)), np.float32)
    if not blobs or not terms:
        return found
    wanted = np.array(terms, np.uint64)
    order = np.argsort(wanted)
    packed = np.frombuffer(b"".join(blobs), TERM)
    hashes = packed["hash"]
    place = np.minimum(np.searchsorted(wanted[order], hashes), len(wanted) - 1)
    hits = np.flatnonzero(wanted[order][place] == hashes)
    ends = np.cumsum([len(blob) // TERM.itemsize for blob in blobs])
    found[np.searchsorted(ends, hits, side="right"), order[place[hits]]] = packed["count"][hits]
    return found


def inverse_frequency(holders: npt.ArrayLike, total: int) -> Scores:
    """Robertson's idf, ln(1 + (N - n + 0.5) / (n + 0.5)), for terms that `holders` of `total` entries hold."""
    n = np.minimum(np.asarray(holders, np.float64), total)
    return np.log1p((total - n + 0.5) / (n + 0.5)).astype(np.float32)


def bm25(counts: Scores, lengths: npt.ArrayLike, weights: npt.ArrayLike, mean_length: float) -> Scores:
    """Scores of entries: `counts` (entries, terms), `lengths` in terms, `weights` of the terms (idf included)."""
    norm = K1 * (1 - B + B * np.asarray(lengths, np.float32) / np.float32(max(1.0, mean_length)))
    share = counts / (counts + norm[:, None])
    return ((K1 + 1) * share @ np.asarray(weights, np.float32)).astype(np.float32)
