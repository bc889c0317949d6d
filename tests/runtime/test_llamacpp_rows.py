"""Blocks over a cache of cells: whatever steps, shares and leaves, a row sees exactly its table's KV."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.core import BLOCK_TOKENS
from perilune.errors import InvalidStateError, Overloaded
from perilune.runtime.llamacpp_rows import RowTable
from tests.contracts.mri_tools import piece

ROWS, BATCH, BLOCKS = 6, 2, 60


@dataclass(slots=True)
class _Cell:
    position: int
    content: int
    rows: set[int]


class _Cells:
    """What llama.cpp's unified cache does with `seq_cp` and `seq_rm`, and a limit on cells."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.cells: list[_Cell] = []

    def _inside(self, row: int, start: int, end: int) -> list[_Cell]:
        return [c for c in self.cells if row in c.rows and start <= c.position and (end < 0 or c.position < end)]

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        for cell in self._inside(source, start, end):
            cell.rows.add(target)

    def remove(self, row: int, start: int, end: int) -> None:
        for cell in self._inside(row, start, end):
            cell.rows.discard(row)
        self.cells = [cell for cell in self.cells if cell.rows]

    def write(self, row: int, position: int, content: int) -> None:
        self.cells.append(_Cell(position, content, {row}))
        assert len(self.cells) <= self.limit, "more cells than blocks hold: some leaked"

    def seen(self, row: int) -> list[tuple[int, int]]:
        return sorted((c.position, c.content) for c in self.cells if row in c.rows)


class _Engine:
    """Cached chains of blocks, and sequences that continue them, within the bound that the engine keeps."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cells = _Cells(BLOCKS * BLOCK_TOKENS)
        self.table = RowTable(ROWS, self.cells)
        self.free = list(range(BLOCKS))
        self.chains: list[list[int]] = [[]]
        self.content: dict[int, list[int]] = {}  # block -> what it holds, token by token
        self.serial = 0

    def step(self) -> None:
        """Up to `BATCH` sequences together, in parts; some fail; some stay cached."""
        names = [f"s{self.serial}-{index}" for index in range(self.random.randint(1, BATCH))]
        tables, starts, ends = {}, {}, {}
        for name in names:
            chain = self.random.choice(self.chains)
            head = chain[: self.random.randint(0, len(chain))]
            fresh = self.random.randint(1, 3)
            while len(self.free) < fresh:
                self.forget_one()
                head = [block for block in head if block in self.content]
                head = head[: next((i for i in range(len(head)) if not self.is_chain(head[: i + 1])), len(head))]
            tables[name] = head + [self.free.pop() for _ in range(fresh)]
            starts[name] = len(head) * BLOCK_TOKENS
            ends[name] = len(tables[name]) * BLOCK_TOKENS - self.random.randint(0, BLOCK_TOKENS - 1)
        for name in names:  # a table may have lost a block to another's room
            if not all(block in self.content for block in tables[name][: starts[name] // BLOCK_TOKENS]):
                self.free += [b for n in names for b in tables[n][starts[n] // BLOCK_TOKENS :]]
                return
        self.compute(names, tables, starts, ends)
        for name in names:
            self.leave(name, tables[name], starts[name] // BLOCK_TOKENS, ends[name])

    def is_chain(self, head: list[int]) -> bool:
        return any(chain[: len(head)] == head for chain in self.chains)

    def compute(
        self, names: list[str], tables: dict[str, list[int]], starts: dict[str, int], ends: dict[str, int]
    ) -> None:
        at = dict(starts)
        while any(at[name] < ends[name] for name in names):
            sizes = {n: min(self.random.choice((1, 20, 32, 50)), ends[n] - at[n]) for n in names if at[n] < ends[n]}
            slices = [piece(n, [0] * size, at[n], tables[n]) for n, size in sizes.items()]
            for part in slices:
                self.table.check(part)
            rows = self.table.open(slices)
            for part in slices:
                assert self.cells.seen(rows[part.seq_id]) == self.expected(part.block_table, part.start)
            fails = self.random.random() < 0.2
            for part in slices:
                done = self.random.randint(0, len(part.token_ids)) if fails else len(part.token_ids)
                self.write(rows[part.seq_id], part.block_table, part.start, part.start + done)
                if fails:
                    self.table.roll_back(rows[part.seq_id], part)
                    self.truncate(part.block_table, part.start)
                else:
                    at[part.seq_id] += done
            self.table.check_integrity()

    def write(self, row: int, table: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            self.serial += 1
            self.cells.write(row, position, self.serial)
            self.content.setdefault(table[position // BLOCK_TOKENS], []).append(self.serial)
        if end > start:
            self.table.commit(row, table, start, end)

    def truncate(self, table: list[int], start: int) -> None:
        for place, block in enumerate(table):
            kept = max(0, start - place * BLOCK_TOKENS)
            if kept < BLOCK_TOKENS and block in self.content:
                self.content[block] = self.content[block][:kept]
                if not kept:
                    del self.content[block]

    def expected(self, table: list[int], tokens: int) -> list[tuple[int, int]]:
        held = [value for block in table for value in self.content.get(block, [])]
        return list(enumerate(held[:tokens]))

    def leave(self, name: str, table: list[int], shared: int, end: int) -> None:
        """Keep the whole blocks as a chain where there is room for another branch, and give the rest up."""
        self.table.release(name)
        whole = end // BLOCK_TOKENS if self.random.random() < 0.7 else shared
        while whole > shared and any(self.width(p) >= ROWS - BATCH for p in range(shared, whole)):
            whole -= 1
        if whole > shared:
            self.chains.append(table[:whole])
        self.give_up(table[whole:])

    def width(self, place: int) -> int:
        return len({chain[place] for chain in self.chains if len(chain) > place})

    def give_up(self, blocks: list[int]) -> None:
        self.table.evict(blocks)
        for block in blocks:
            self.content.pop(block, None)
        self.free += blocks

    def forget_one(self) -> None:
        """Evict the blocks of a chain that no other chain has."""
        chain = self.chains.pop(self.random.randrange(1, len(self.chains)))
        kept = {block for other in self.chains for block in other}
        self.give_up([block for block in chain if block not in kept])


@given(st.integers(0, 10**6))
def test_rows_see_their_tables(seed: int) -> None:
    engine = _Engine(seed)
    for _ in range(25):
        engine.step()
        engine.table.check_integrity()
    while len(engine.chains) > 1:
        engine.forget_one()
    assert engine.table.written_blocks == 0
    assert not engine.cells.cells


def _written(table: RowTable, name: str, blocks: list[int]) -> int:
    part = piece(name, [0] * (len(blocks) * BLOCK_TOKENS), 0, blocks)
    row = table.open([part])[name]
    table.commit(row, blocks, 0, part.end)
    return row


def test_more_branches_than_rows_are_refused() -> None:
    table = RowTable(3, _Cells(1000))
    for block in range(3):
        _written(table, f"s{block}", [block])
        table.release(f"s{block}")
    with pytest.raises(Overloaded, match="3 different blocks"):
        _written(table, "one too many", [3])
    table.evict([0])
    _written(table, "fits now", [3])
    table.check_integrity()


def test_a_block_at_another_place_is_not_read() -> None:
    table = RowTable(3, _Cells(1000))
    _written(table, "a", [0, 1])
    for torn in (piece("a", [0], 64, [1, 0, 2]), piece("a", [0], 65, [0, 1, 2]), piece("a", [0], 32, [5, 2])):
        with pytest.raises(InvalidStateError):
            table.check(torn)
    table.check(piece("a", [0], 64, [0, 1, 2]))
