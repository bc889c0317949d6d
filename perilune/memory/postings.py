"""Search postings of a run of passages as one immutable blob: written by the parser process, read by `index`.

Knows bytes, not SQL and not scoring. Stdlib only, because parser processes import it. Layout, little-endian:

    u32 version, u32 passages P, u32 terms T, u32 postings N
    u64 hash[T]         sorted 64-bit hashes of the terms
    u32 begin[T + 1]    where a term's postings begin
    u16 length[P]       terms per passage, as BM25 weighs them
    u16 passage[N]      which passage, counted from the blob's first
    u16 frequency[N]    how often it holds the term

A blob covers at most 65,535 passages; a document has one blob per written batch.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

VERSION = 1
HEADER = struct.Struct("<IIII")
MAX_PASSAGES = 65_535
_MAX_U16 = 65_535


def term_hash(term: str) -> int:
    """64 bits of BLAKE2b: two terms of one document share a hash about once in 10^10 documents."""
    return int.from_bytes(hashlib.blake2b(term.encode(), digest_size=8).digest(), "little")


def build(passages: Sequence[Iterable[str]], lengths: Sequence[int]) -> bytes:
    """The blob of these passages' terms and lengths, in order. Raises `ValueError` past 65,535 passages."""
    if len(passages) > MAX_PASSAGES:
        raise ValueError(f"{len(passages)} passages in one blob; at most {MAX_PASSAGES} fit")
    entries: dict[str, tuple[array[int], array[int]]] = {}
    for number, terms in enumerate(passages):
        counts = Counter(terms)
        for term, count in counts.items():
            entry = entries.get(term)
            if entry is None:
                entry = entries[term] = (array("H"), array("H"))
            entry[0].append(number)
            entry[1].append(min(count, _MAX_U16))
    hashed = sorted((term_hash(term), entry) for term, entry in entries.items())
    begins = array("I", [0])
    numbers, frequencies = array("H"), array("H")
    for _, (which, often) in hashed:
        numbers.extend(which)
        frequencies.extend(often)
        begins.append(len(numbers))
    hashes = array("Q", (value for value, _ in hashed))
    weighed = array("H", (min(length, _MAX_U16) for length in lengths))
    parts = [HEADER.pack(VERSION, len(passages), len(hashes), len(numbers))]
    for values in (hashes, begins, weighed, numbers, frequencies):
        if sys.byteorder == "big":
            values.byteswap()
        parts.append(values.tobytes())
    return b"".join(parts)
