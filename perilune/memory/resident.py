"""What both arms of the index know, in memory: proposes entries in milliseconds where there aren't too many.

Knows SQL and arithmetic, no files and no LanceDB. Filled from SQL, in the background at first; every search
compares its counts with SQL's and reads what is new, so that other processes' writes are seen and what was
deleted is let go. As with any index its proposals are scored again from SQL. Until it is filled, and above
`MAX_ENTRIES`, it isn't `ready`, and the index is asked.

Rows lie in segments, which are joined as they grow. Words: postings by term, scored by BM25. Meaning: vectors less
their mean, a bit for each number's sign; the rows of fewest differing bits are scored by bytes (int8).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from perilune.memory import scoring
from perilune.memory.entries import HALF
from perilune.memory.schema import ENTRIES, VECTORS
from perilune.memory.scope import Scope
from perilune.memory.store import Store
from perilune.memory.vectors.protocol import Terms, Vector

MAX_ENTRIES = 250_000
"""Of all tenants. 100,000 entries of 40 terms take about 75 MB."""

CLOSE_ROWS = 2_048
"""Rows of fewest differing bits that are scored by bytes; where no more are in scope, all are."""

VECTORS_EVERY_S = 0.25
"""Vectors come after their entries; at most so often is it asked which have come, of the newest `_MAX_WAITING`."""

ALL_VECTORS_EVERY_S = 5.0
"""At most so often it is asked, behind the searches, of all that lack one; some never get one."""

LET_GO_EVERY_S = 1.0
"""At most so often everything is held against SQL; what is deleted isn't found meanwhile, it only takes a place."""

SOON = 200
"""Entries that a search reads itself; where more are new, it asks the index, and they are read behind it."""

_READ = 4_000
_RECENTRE = 8
_MAX_WAITING = 900
_JOIN_AT = 20  # segments: beyond, two are alike in size
_COLUMNS = ("id", "tenant", "source_id", "number", "page", "at", "speaker", "entities", "terms", "length")
_log = logging.getLogger(__name__)

Bits = npt.NDArray[np.uint64]
Bytes8 = npt.NDArray[np.int8]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


class Codes:
    """Small numbers for strings, the same for every segment."""

    def __init__(self) -> None:
        self._known: dict[str | None, int] = {}

    def of(self, values: Iterable[str | None]) -> npt.NDArray[np.int32]:
        known = self._known
        return np.array([known.setdefault(value, len(known)) for value in values], np.int32)

    def found(self, values: Iterable[str]) -> Mask:
        """Which codes stand for one of these."""
        wanted = np.zeros(len(self._known), bool)
        wanted[[self._known[value] for value in values if value in self._known]] = True
        return wanted


@dataclass(slots=True)
class Segment:
    """Rows in order of their ids. `begin[t]` to `begin[t + 1]` are the postings of `terms[t]`: rows and counts.
    `bits` and `bytes8` (with `scale`) are of vectors less the mean, where `has`."""

    ids: Ints
    tenants: npt.NDArray[np.int32]
    sources: npt.NDArray[np.int32]
    speakers: npt.NDArray[np.int32]
    numbers: Ints
    pages: Floats  # NaN: none
    times: npt.NDArray[np.float64]  # NaN: unknown
    names: list[str]
    lengths: Floats
    terms: npt.NDArray[np.uint64]
    begin: Ints
    rows: npt.NDArray[np.int32]
    counts: npt.NDArray[np.uint16]
    has: Mask
    bits: Bits
    bytes8: Bytes8
    scale: Floats

    def inside(self, scope: Scope, tenants: Codes, sources: Codes, speakers: Codes) -> Mask:
        """Which rows are in scope."""
        mask: Mask = tenants.found([scope.tenant])[self.tenants]
        if scope.sources is not None:
            mask &= sources.found(scope.sources)[self.sources]
        if scope.speakers:
            mask &= speakers.found(scope.speakers)[self.speakers]
        if scope.since_s is not None:
            mask &= self.times >= scope.since_s
        if scope.until_s is not None:
            mask &= self.times <= scope.until_s
        for values, limits in ((self.numbers, scope.numbers), (self.pages, scope.pages)):
            if limits is not None:
                mask &= (values >= limits[0]) & (values <= limits[1])
        if scope.entities:
            wanted = set(scope.entities)
            for row in np.flatnonzero(mask).tolist():
                mask[row] = not wanted.isdisjoint(self.names[row].split("\n"))
        return mask

    def words(self, terms: Terms, mask: Mask) -> Floats:
        """BM25 of every row in the mask, 0 elsewhere."""
        found = np.zeros(len(self.ids), np.float32)
        norm = scoring.K1 * (1 - scoring.B + scoring.B * self.lengths / np.float32(max(1.0, terms.mean_length)))
        wanted = np.array(list(terms.weights), np.uint64)
        places = np.searchsorted(self.terms, wanted)
        for term, place, weight in zip(wanted, places.tolist(), terms.weights.values(), strict=True):
            if place < len(self.terms) and self.terms[place] == term:
                part = slice(self.begin[place], self.begin[place + 1])
                rows, counts = self.rows[part], self.counts[part].astype(np.float32)
                found[rows] += np.float32(weight * (scoring.K1 + 1)) * counts / (counts + norm[rows])
        found[~mask] = 0
        return found

    def near(self, question: Floats, mean: Floats, mask: Mask) -> tuple[npt.NDArray[np.intp], Floats]:
        """(rows, closeness) of the nearest rows: cosines less one number, the same for all."""
        rows = np.flatnonzero(mask & self.has)
        if len(rows) > CLOSE_ROWS:
            asked = _signs((question - mean)[None])[0]
            differ = np.bitwise_count(self.bits[rows] ^ asked).sum(axis=1, dtype=np.uint16)
            rows = rows[np.argpartition(differ, CLOSE_ROWS)[:CLOSE_ROWS]]
        return rows, (self.bytes8[rows].astype(np.float32) @ question) * self.scale[rows]

    def vectors(self, rows: npt.NDArray[np.intp], mean: Floats) -> Floats:
        """Those of these rows, as exactly as they are kept."""
        found: Floats = self.bytes8[rows].astype(np.float32) * self.scale[rows][:, None] + mean
        return found

    def put_vectors(self, rows: npt.NDArray[np.intp], vectors: Vector, mean: Floats) -> None:
        """Keep the vectors of these rows."""
        centred = vectors - mean
        scale = np.maximum(np.abs(centred).max(axis=1), np.float32(1e-9)) / np.float32(127)
        self.bits[rows], self.scale[rows] = _signs(centred), scale
        self.bytes8[rows] = np.rint(centred / scale[:, None]).astype(np.int8)
        self.has[rows] = True


def _signs(centred: Floats) -> Bits:
    """(rows, width / 64): a bit for each number; the last ones of a width that 64 doesn't divide are 0."""
    packed = np.packbits(centred > 0, axis=1)
    wide = np.zeros((len(packed), -(-packed.shape[1] // 8) * 8), np.uint8)
    wide[:, : packed.shape[1]] = packed
    return wide.view(np.uint64)


def _postings(
    hashes: npt.NDArray[np.uint64], rows: npt.NDArray[np.int32], counts: npt.NDArray[np.uint16]
) -> tuple[npt.NDArray[np.uint64], Ints, npt.NDArray[np.int32], npt.NDArray[np.uint16]]:
    """Sorted by term."""
    order = np.argsort(hashes, kind="stable")
    terms, begin = np.unique(hashes[order], return_index=True)
    return terms, np.append(begin, len(hashes)).astype(np.int64), rows[order], counts[order]


def joined(segments: Sequence[Segment], keep: Sequence[Mask]) -> Segment:
    """One segment of the rows that are kept of several, in order."""
    hashes, rows, counts, first = [], [], [], 0
    for segment, kept in zip(segments, keep, strict=True):
        place = np.cumsum(kept, dtype=np.int64) - 1 + first
        mine = kept[segment.rows]
        hashes.append(np.repeat(segment.terms, np.diff(segment.begin))[mine])
        rows.append(place[segment.rows[mine]].astype(np.int32))
        counts.append(segment.counts[mine])
        first += int(kept.sum())

    def whole(name: str) -> npt.NDArray[np.generic]:
        parts = [getattr(segment, name)[kept] for segment, kept in zip(segments, keep, strict=True)]
        found: npt.NDArray[np.generic] = np.concatenate(parts)
        return found

    names = [
        segment.names[row]
        for segment, kept in zip(segments, keep, strict=True)
        for row in np.flatnonzero(kept).tolist()
    ]
    terms, begin, rows_of, counts_of = _postings(
        np.concatenate(hashes), np.concatenate(rows), np.concatenate(counts)
    )
    arrays = {
        name: whole(name) for name in Segment.__slots__ if name not in ("names", "terms", "begin", "rows", "counts")
    }
    return Segment(**arrays, names=names, terms=terms, begin=begin, rows=rows_of, counts=counts_of)  # type: ignore[arg-type]


class Resident:
    """Thread-safe. `model` and `width` are the embedder's; no width: words only."""

    def __init__(self, store: Store, model: str = "", width: int = 0, most: int = MAX_ENTRIES) -> None:
        self._store = store
        self._model = model
        self._width = width
        self._most = most
        self._lock = threading.RLock()
        self._segments: list[Segment] = []
        self._mean: Floats | None = None
        self._mean_of = 0  # vectors
        self._last = -1  # the highest id that was read
        self._tenants, self._sources, self._speakers = Codes(), Codes(), Codes()
        self._asked_s = self._asked_all_s = self._let_go_s = 0.0
        self._older: int | None = None  # entries before this id may have a vector by now
        self._filled = False  # it knew everything at one time
        self._suspect = False  # it holds other entries than SQL
        self._working: threading.Thread | None = None
        self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed, working = True, self._working
        if working is not None:
            working.join()

    def ready(self, tenant: str, entries: int) -> bool:
        """Whether it knows what SQL has now: the tenant's `entries`. Reads a little that is new; more is read
        behind it."""
        if entries > self._most or self._closed:
            return False
        newest = self._newest()
        with self._lock:
            if self._filled and self._last < newest:
                self._read_part(SOON)
            count, now_s = self._count(tenant), time.monotonic()
            behind = not self._filled or self._last < newest or count < entries
            # Fewer, with everything new read: another process took ids before those and committed behind them.
            differs = self._filled and self._last >= newest and count != entries
            if differs and now_s - self._let_go_s > LET_GO_EVERY_S:
                self._suspect = True
            if not behind and self._width and now_s - self._asked_s > VECTORS_EVERY_S:
                self._asked_s = now_s
                older = self._read_vectors()
                if older is not None and now_s - self._asked_all_s > ALL_VECTORS_EVERY_S:
                    self._asked_all_s, self._older = now_s, older
            if behind or self._suspect or self._older is not None or len(self._segments) > _JOIN_AT:
                self._begin()
            return not behind

    def words(self, terms: Terms, limit: int, scope: Scope) -> list[int]:
        """Ids of the best entries by BM25, best first."""
        parts = [(each.ids, each.words(terms, mask)) for each, mask in self._inside(scope)]
        return _best([(ids[scores > 0], scores[scores > 0]) for ids, scores in parts], limit)

    def nearest(self, vector: Vector, limit: int, scope: Scope) -> list[int]:
        """Ids of the entries that are nearest by cosine, nearest first."""
        with self._lock:  # the mean and what is less it change together
            if self._mean is None:
                return []
            found = []
            for each, mask in self._inside(scope):
                rows, close = each.near(vector, self._mean, mask)
                found.append((each.ids[rows], close))
        return _best(found, limit)

    def _inside(self, scope: Scope) -> list[tuple[Segment, Mask]]:
        with self._lock:
            codes = (self._tenants, self._sources, self._speakers)
            return [(each, each.inside(scope, *codes)) for each in self._segments]

    # ------------------------------------------------------------------------------------------------ reading

    def _begin(self) -> None:
        """Work behind the searches, unless that goes on."""
        if self._working is None and not self._closed:
            self._working = threading.Thread(target=self._work, name="resident", daemon=True)
            self._working.start()

    def _work(self) -> None:
        """Read what is new, forget what is gone, join segments. A search that comes meanwhile isn't held up."""
        try:
            if self._suspect:
                self._let_go()
            while not self._closed and self._read_part(_READ):
                time.sleep(0)  # others' turn
            while not self._closed and self._older is not None:
                self._older = self._read_vectors(self._older)
                time.sleep(0)
            while not self._closed and self._join():
                time.sleep(0)
        except Exception as error:  # a database that is busy or away: the next search begins it again
            _log.info("what is kept in memory waits: %s", type(error).__name__)
        finally:
            with self._lock:
                self._working = None

    def _read_part(self, most: int) -> bool:
        """Read what is new; whether there may be more."""
        query = sa.select(*(ENTRIES.c[name] for name in _COLUMNS)).order_by(ENTRIES.c.id).limit(most)
        with self._lock:
            with self._store.read() as connection:
                rows = connection.execute(query.where(ENTRIES.c.id > self._last)).all()
            if sum(len(each.ids) for each in self._segments) + len(rows) > self._most:
                self._segments, self._most, self._filled = [], 0, False  # the index is asked from now on
                return False
            self._filled = self._filled or len(rows) < most
            if rows:
                self._last = rows[-1].id
                self._segments.append(self._segment(rows))
                self._vectors_of(self._segments[-1], self._segments[-1].ids.tolist())
        return len(rows) == most

    def _newest(self) -> int:
        """The highest id that SQL has."""
        with self._store.read() as connection:
            newest = connection.execute(sa.select(sa.func.max(ENTRIES.c.id))).scalar()
        return -1 if newest is None else int(newest)

    def _segment(self, rows: Sequence[sa.Row[tuple[object, ...]]]) -> Segment:
        columns = dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True))
        blobs: list[bytes] = [bytes(blob) for blob in columns["terms"]]
        packed = np.frombuffer(b"".join(blobs), scoring.TERM)
        held = [len(blob) // scoring.TERM.itemsize for blob in blobs]
        at = np.repeat(np.arange(len(rows), dtype=np.int32), held)
        terms, begin, rows_of, counts = _postings(packed["hash"].copy(), at, packed["count"].copy())
        count = len(rows)
        return Segment(
            ids=np.array(columns["id"], np.int64),
            tenants=self._tenants.of(columns["tenant"]),
            sources=self._sources.of(columns["source_id"]),
            speakers=self._speakers.of(columns["speaker"]),
            numbers=np.array(columns["number"], np.int64),
            pages=np.array(columns["page"], np.float32),
            times=np.array(columns["at"], np.float64),
            names=list(columns["entities"]),
            lengths=np.array(columns["length"], np.float32),
            terms=terms,
            begin=begin,
            rows=rows_of,
            counts=counts,
            has=np.zeros(count, bool),
            bits=np.zeros((count, -(-self._width // 64)), np.uint64),
            bytes8=np.zeros((count, self._width), np.int8),
            scale=np.zeros(count, np.float32),
        )

    def _join(self) -> bool:
        """Join the last two segments of which the first isn't twice as long as the second; false where there are
        none. Vectors that come meanwhile are asked for again."""
        with self._lock:
            sizes = [len(each.ids) for each in self._segments]
            places = [at for at in range(len(sizes) - 1) if sizes[at] <= 2 * sizes[at + 1]]
            if not places:
                return False
            pair, mean = self._segments[places[-1] : places[-1] + 2], self._mean
        made = joined(pair, [np.ones(len(each.ids), bool) for each in pair])
        self._replace(pair, [made], mean)
        return True

    def _let_go(self) -> None:
        """Forget what SQL no longer has; everything, to be read anew, where it has what was passed over."""
        self._let_go_s, self._suspect = time.monotonic(), False
        with self._lock:
            segments, last, mean = list(self._segments), self._last, self._mean
        with self._store.read() as connection:
            alive = np.array(connection.execute(sa.select(ENTRIES.c.id)).scalars().all(), np.int64)
        held = np.concatenate([np.empty(0, np.int64), *(each.ids for each in segments)])
        if not np.isin(alive[alive <= last], held).all():
            with self._lock:
                self._segments, self._last, self._filled = [], -1, False
            return
        for segment in segments:
            mask = np.isin(segment.ids, alive)
            if not mask.all():
                self._replace([segment], [joined([segment], [mask])] if mask.any() else [], mean)

    def _replace(self, old: Sequence[Segment], new: Sequence[Segment], mean: Floats | None) -> None:
        """Neighbours by others, in their place. Not where the mean is another one by now: the vectors of the new
        ones are less the earlier mean, `mean`; who replaces does it again."""
        with self._lock:
            if self._mean is not mean:
                return
            for at, segment in enumerate(self._segments):
                if segment is old[0]:
                    self._segments[at : at + len(old)] = new
                    return

    def _read_vectors(self, before: int | None = None) -> int | None:
        """Those that have come since, of the newest entries (before this id) that lack one. Returns the first of
        these entries where older ones may lack one, too."""
        left, first = _MAX_WAITING, None
        with self._lock:
            for segment in reversed(self._segments):
                lacking = ~segment.has if before is None else ~segment.has & (segment.ids < before)
                waiting: list[int] = segment.ids[lacking][-left:].tolist() if left else []
                if waiting:
                    self._vectors_of(segment, waiting)
                    left, first = left - len(waiting), waiting[0]
        return None if left else first

    def _vectors_of(self, segment: Segment, ids: Sequence[int]) -> None:
        """Read the vectors of these ids, of one segment, where there are any."""
        if not self._width:
            return
        query = sa.select(VECTORS.c.entry_id, VECTORS.c.vector).where(VECTORS.c.model == self._model)
        few = len(ids) <= _MAX_WAITING  # these may lie far apart
        query = query.where(VECTORS.c.entry_id.in_(ids) if few else VECTORS.c.entry_id.between(ids[0], ids[-1]))
        with self._store.read() as connection:
            rows = connection.execute(query).all()
        wanted = set(ids)
        rows = [row for row in rows if row.entry_id in wanted and len(row.vector) == HALF.itemsize * self._width]
        if not rows:
            return
        stored = np.frombuffer(b"".join(row.vector for row in rows), HALF).reshape(len(rows), self._width)
        vectors = stored.astype(np.float32)
        if self._mean is None or len(vectors) > _RECENTRE * self._mean_of:
            self._recentre(vectors.mean(axis=0), len(vectors))
        assert self._mean is not None
        places = np.searchsorted(segment.ids, np.array([row.entry_id for row in rows], np.int64))
        segment.put_vectors(places, vectors, self._mean)

    def _recentre(self, mean: Floats, of: int) -> None:
        """Take another mean, of more vectors."""
        if self._mean is not None:
            for segment in self._segments:
                rows = np.flatnonzero(segment.has)
                segment.put_vectors(rows, segment.vectors(rows, self._mean), mean)
        self._mean, self._mean_of = mean, of

    def _count(self, tenant: str) -> int:
        mine = self._tenants.found([tenant])
        return sum(int(mine[segment.tenants].sum()) for segment in self._segments)


def _best(found: Sequence[tuple[Ints, Floats]], limit: int) -> list[int]:
    """The ids of the highest scores, highest first."""
    if not found:
        return []
    ids = np.concatenate([part[0] for part in found])
    scores = np.concatenate([part[1] for part in found])
    if len(ids) > limit:
        best = np.argpartition(-scores, limit)[:limit]
        ids, scores = ids[best], scores[best]
    order: list[int] = ids[np.argsort(-scores, kind="stable")].tolist()
    return order
