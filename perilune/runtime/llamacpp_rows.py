"""Which of llama.cpp's sequences ("rows") hold which KV blocks: the MRI's block tables over a cache of cells.

llama.cpp's unified cache is a bag of cells; a cell has one position and belongs to any set of rows, and a token of
a row sees all of that row's cells. Blocks don't exist there. So: a sequence that steps has a row whose cells are
those of its block table, and blocks that no stepping sequence needs stay alive in any row that has nothing else at
their positions. Sharing a block adds its cells to another row; no KV is ever copied.

Rows are few (`max_branches`), so many different blocks at the same positions need many rows: at most as many as
there are rows may hold KV at once. The engine keeps to that bound; what doesn't fit is refused, never dropped.

Knows ids, positions and counts. Knows nothing of llama.cpp's functions (`Cells`), tensors or threads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Protocol

from perilune.core import BLOCK_TOKENS
from perilune.errors import InvalidStateError, Overloaded
from perilune.runtime.mri import SequenceSlice

_ALL = -1


class Cells(Protocol):
    """The cache. Positions are [start, end); an end of -1 is the last one there is."""

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Add the cells of one row to another."""
        ...

    def remove(self, row: int, start: int, end: int) -> None:
        """Take cells out of a row; those in no row become free."""
        ...


class RowTable:
    """Rows 0 … num_rows-1. One thread.

    A step is `open` for all of its slices, then `commit` as parts of them are computed, or `roll_back`.
    """

    def __init__(self, num_rows: int, cells: Cells) -> None:
        self._cells = cells
        self._rows: list[dict[int, int]] = [{} for _ in range(num_rows)]  # row -> place in the table -> block
        self._row_of: dict[str, int] = {}  # the row that a sequence had last
        self._used: dict[int, None] = dict.fromkeys(range(num_rows))  # oldest use first
        self._place: dict[int, int] = {}  # block -> its place
        self._held: dict[int, set[int]] = {}  # block -> rows that have it
        self._tokens: dict[int, int] = {}  # block -> tokens of it that have KV

    @property
    def written_blocks(self) -> int:
        """Blocks that hold KV."""
        return len(self._held)

    def holds(self, block: int) -> bool:
        return block in self._held

    # ------------------------------------------------------------------------------------------------- a step

    def check(self, piece: SequenceSlice) -> None:
        """Raises `InvalidStateError` if a block before the slice's start isn't there up to it."""
        for place in range(_blocks(piece.start)):
            block = piece.block_table[place]
            wanted = min(BLOCK_TOKENS, piece.start - place * BLOCK_TOKENS)
            if self._place.get(block) != place or self._tokens[block] < wanted:
                raise InvalidStateError(
                    f"Sequence {piece.seq_id} continues at {piece.start}; block {block} before that doesn't hold "
                    "its KV.",
                    hint="Compute the missing tokens first.",
                )

    def open(self, slices: Sequence[SequenceSlice]) -> dict[str, int]:
        """Give each slice a row that holds exactly the tokens before its start. Returns rows by sequence.

        The slices are checked. Raises `Overloaded` if more blocks of the same positions hold KV than rows exist.
        """
        for piece in slices:
            self._forget_rewritten(piece)
        rows: dict[str, int] = {}
        for piece in slices:
            rows[piece.seq_id] = self._choose(piece, rows.values())
            self._touch(rows[piece.seq_id])
        busy = set(rows.values())
        for piece in slices:
            self._fill(rows[piece.seq_id], piece, busy)
            self._row_of[piece.seq_id] = rows[piece.seq_id]
        return rows

    def commit(self, row: int, table: Sequence[int], start: int, end: int) -> None:
        """The row's tokens [start, end) have KV now, in the blocks of `table`."""
        for place in range(start // BLOCK_TOKENS, _blocks(end)):
            block = table[place]
            self._rows[row][place] = block
            self._place[block] = place
            self._held.setdefault(block, set()).add(row)
            self._tokens[block] = min(BLOCK_TOKENS, end - place * BLOCK_TOKENS)

    def roll_back(self, row: int, piece: SequenceSlice) -> None:
        """Take out what a failed step computed of a slice."""
        self._cells.remove(row, piece.start, _ALL)
        for place in range(_blocks(piece.start), _blocks(piece.end)):
            block = self._rows[row].pop(place, None)
            if block is not None:
                self._unlink(block, row)
        partial = piece.block_table[piece.start // BLOCK_TOKENS]
        if piece.start % BLOCK_TOKENS and row in self._held.get(partial, ()):
            self._tokens[partial] = piece.start % BLOCK_TOKENS

    # ------------------------------------------------------------------------------------- releasing, evicting

    def release(self, seq_id: str) -> None:
        """The sequence is over. Its blocks stay where they are until they are evicted or the row is needed."""
        self._row_of.pop(seq_id, None)

    def evict(self, blocks: Iterable[int]) -> None:
        """Blocks' KV is no longer needed."""
        doomed: dict[int, list[int]] = {}
        for block in dict.fromkeys(blocks):
            for row in self._held.get(block, ()):
                doomed.setdefault(row, []).append(self._place[block])
        for row, places in doomed.items():
            self._remove(row, places)

    # ------------------------------------------------------------------------------------------------ inside

    def _forget_rewritten(self, piece: SequenceSlice) -> None:
        """Blocks that a slice writes lose what they held from its first position on, in every row."""
        first = _blocks(piece.start)
        self.evict(piece.block_table[first : _blocks(piece.end)])
        if piece.start % BLOCK_TOKENS:
            block = piece.block_table[first - 1]
            if self._tokens[block] > piece.start % BLOCK_TOKENS:
                for row in self._held[block]:
                    self._cells.remove(row, piece.start, first * BLOCK_TOKENS)
                self._tokens[block] = piece.start % BLOCK_TOKENS

    def _choose(self, piece: SequenceSlice, busy: Collection[int]) -> int:
        """The row the sequence had, a row whose blocks it continues, an empty one, or the one longest unused."""
        before = self._row_of.get(piece.seq_id)
        if before is not None and before not in busy:
            return before
        owned = set(self._row_of.values())
        idle = [row for row in self._used if row not in busy and row not in owned]
        if piece.start:
            last = _blocks(piece.start) - 1
            for row in sorted(self._held[piece.block_table[last]]):
                if row in idle and len(self._rows[row]) == last + 1:
                    return row
        for row in idle:
            if not self._rows[row]:
                return row
        if not idle:
            idle = [row for row in self._used if row not in busy]
        if not idle:
            raise Overloaded("A step has more sequences than llama.cpp has.", hint="Lower runtime.max_batch_size.")
        return idle[0]

    def _touch(self, row: int) -> None:
        del self._used[row]
        self._used[row] = None

    def _fill(self, row: int, piece: SequenceSlice, busy: Collection[int]) -> None:
        """Make a row hold the blocks before a slice's start and nothing else."""
        wanted = {place: piece.block_table[place] for place in range(_blocks(piece.start))}
        held = self._rows[row]
        self._vacate(row, sorted(place for place, block in held.items() if wanted.get(place) != block), busy)
        missing = [place for place in wanted if place not in held]
        sources = [(place, min(self._held[wanted[place]])) for place in missing]
        for source, run in _runs(sources):
            self._copy(source, row, run)
        if piece.start % BLOCK_TOKENS:  # it grows in this row: what other rows have of it would fall behind
            last = _blocks(piece.start) - 1
            for other in self._held[wanted[last]] - {row}:
                self._remove(other, [last])

    def _vacate(self, row: int, places: Sequence[int], busy: Collection[int]) -> None:
        """Empty places of a row; blocks that no other row has move to one that is free there."""
        alone = [place for place in places if len(self._held[self._rows[row][place]]) == 1]
        moves = [(place, self._free_row(place, row, busy)) for place in alone]
        for target, run in _runs(moves):
            self._copy(row, target, run)
        self._remove(row, places)

    def _free_row(self, place: int, leaving: int, busy: Collection[int]) -> int:
        """A row outside the step with nothing at a place, made so if it holds what another has too."""
        others = [row for row in self._used if row not in busy and row != leaving]
        for row in others:
            if place not in self._rows[row]:
                return row
        for row in others:
            if len(self._held[self._rows[row][place]]) > 1:
                self._remove(row, [place])
                return row
        raise Overloaded(
            f"More than {len(self._rows)} different blocks hold KV of the same positions.",
            hint="Evict some, or lower runtime.max_batch_size.",
        )

    def _copy(self, source: int, target: int, places: Sequence[int]) -> None:
        """Add neighbouring blocks of a row to another. The last may be partly filled."""
        last = self._tokens[self._rows[source][places[-1]]]
        self._cells.copy(source, target, places[0] * BLOCK_TOKENS, places[-1] * BLOCK_TOKENS + last)
        for place in places:
            block = self._rows[source][place]
            self._rows[target][place] = block
            self._held[block].add(target)

    def _remove(self, row: int, places: Iterable[int]) -> None:
        for _, run in _runs([(place, row) for place in sorted(places)]):
            self._cells.remove(row, run[0] * BLOCK_TOKENS, (run[-1] + 1) * BLOCK_TOKENS)
            for place in run:
                self._unlink(self._rows[row].pop(place), row)

    def _unlink(self, block: int, row: int) -> None:
        rows = self._held[block]
        rows.discard(row)
        if not rows:
            del self._held[block], self._place[block], self._tokens[block]

    def check_integrity(self) -> None:
        """Raises AssertionError when rows, places and counts disagree."""
        for row, blocks in enumerate(self._rows):
            for place, block in blocks.items():
                assert self._place[block] == place, f"block {block} is in two places"
                assert row in self._held[block], f"row {row} isn't known to hold block {block}"
        listed = {(row, block) for block, rows in self._held.items() for row in rows}
        assert listed == {(row, block) for row, blocks in enumerate(self._rows) for block in blocks.values()}
        assert self._held.keys() == self._place.keys() == self._tokens.keys()
        assert all(self._held.values()), "a block that no row holds"


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _runs(places: Sequence[tuple[int, int]]) -> Iterable[tuple[int, list[int]]]:
    """Neighbouring places of one row together. `places` are (place, row), ascending."""
    for (row, _), group in groupby(enumerate(places), key=lambda item: (item[1][1], item[1][0] - item[0])):
        yield row, [place for _, (place, _) in group]
