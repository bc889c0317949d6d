"""llama.cpp at long contexts whose prefill would take hours: q8_0 KV, filled by restoring a made-up state.

A short prompt is prefilled, its state saved, and its rows repeated under new positions; restoring that takes
seconds. What attention costs depends on the number of rows, not on what is in them.
"""

from __future__ import annotations

import ctypes
import struct

import llama_cpp
import numpy as np
import numpy.typing as npt

from bench.engines.llamacpp import LlamaCpp
from bench.worker import BenchEngine, LoadSpec

_SEED_TOKENS = 256
_ROOM_TOKENS = 256
_Q8_0 = 8  # ggml_type
_HEADER = struct.Struct("<IiII")  # magic, sequence, streams, cells
_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_LAYOUT = struct.Struct("<II")  # whether V is transposed, layers
_ROWS = struct.Struct("<iQ")  # type, bytes of a row

Bytes = npt.NDArray[np.uint8]


class LlamaCppLong(LlamaCpp):
    """`decode` takes a prompt's length and fills the KV with as many made-up rows."""

    def __init__(self, spec: LoadSpec) -> None:
        super().__init__(spec, kv_type=_Q8_0, room_tokens=_ROOM_TOKENS)
        self.prefill([token % 1000 + 5 for token in range(_SEED_TOKENS)])
        self._seed = self._save()

    def prefill(self, token_ids: list[int]) -> int:
        if len(token_ids) <= _SEED_TOKENS:
            return super().prefill(token_ids)
        state = repeated(self._seed, len(token_ids))
        llama_cpp.llama_memory_clear(self._memory, False)
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if llama_cpp.llama_state_seq_set_data(self._context, pointer, state.size, 0) != state.size:
            raise RuntimeError("llama.cpp did not take the whole state")
        return token_ids[-1]

    def _save(self) -> Bytes:
        state = np.empty(llama_cpp.llama_state_seq_get_size(self._context, 0), np.uint8)
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if llama_cpp.llama_state_seq_get_data(self._context, pointer, state.size, 0) != state.size:
            raise RuntimeError("llama.cpp did not give its whole state")
        return state


def repeated(state: Bytes, tokens: int) -> Bytes:
    """A state of one sequence with its rows repeated to `tokens`, positions 0, 1, … Format of llama.cpp's
    llama_kv_cache::state_write, V not transposed (flash attention). Raises ValueError for another."""
    magic, sequence, streams, cells = _HEADER.unpack_from(state.data)
    at = _HEADER.size + cells * _CELL.itemsize
    transposed, layers = _LAYOUT.unpack_from(state.data, at)
    if streams != 1 or transposed:
        raise ValueError("the state is not of one stream with rows of V")
    at += _LAYOUT.size
    positions = np.zeros(tokens, _CELL)
    positions["position"], positions["sequences"] = np.arange(tokens), 1
    head = _HEADER.pack(magic, sequence, streams, tokens) + positions.tobytes() + _LAYOUT.pack(transposed, layers)
    _, row_bytes = _ROWS.unpack_from(state.data, at)
    out = np.empty(len(head) + 2 * layers * (_ROWS.size + tokens * row_bytes), np.uint8)
    out[: len(head)] = np.frombuffer(head, np.uint8)
    place = len(head)
    for _ in range(2 * layers):  # the layers' K, then their V
        _, row_bytes = _ROWS.unpack_from(state.data, at)
        out[place : place + _ROWS.size] = state[at : at + _ROWS.size]
        rows = state[at + _ROWS.size : at + _ROWS.size + cells * row_bytes].reshape(cells, row_bytes)
        place += _ROWS.size
        room = out[place : place + tokens * row_bytes].reshape(tokens, row_bytes)
        for first in range(0, tokens, cells):
            room[first : first + cells] = rows[: tokens - first]
        place += tokens * row_bytes
        at += _ROWS.size + cells * row_bytes
    if at != state.size or place != out.size:
        raise ValueError("the state holds more than rows of K and V")
    return out


def load(spec: LoadSpec) -> BenchEngine:
    return LlamaCppLong(spec)
