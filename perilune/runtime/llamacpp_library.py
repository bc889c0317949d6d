"""llama.cpp's C interface as llama-cpp-python gives it: one model, one context, one batch at a time.

Knows ctypes and llama.cpp's functions. Knows nothing of blocks, sequences or sampling. llama_cpp is imported when a
model is loaded, so that this module costs nothing where the extra isn't installed.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.errors import ConfigError, InternalError, Overloaded, UnsupportedModel
from perilune.runtime.mri import CancelFlag

_LOG = logging.getLogger(__name__)
_WARNING_LEVEL, _ERROR_LEVEL = 3, 4  # ggml_log_level
_ABORTED = 2  # llama_decode

OUTPUT_BYTES = 128 * 1024**2
"""llama.cpp keeps room for one row of logits per sequence id, in use or not: this bounds their number."""

MIN_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One token to compute: its position, its llama.cpp sequence, and whether its logits are wanted."""

    token: int
    position: int
    sequence: int
    logits: bool


def import_llama_cpp() -> Any:
    """The package, with its log sent to ours. Raises `ConfigError` saying how to install it."""
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError, FileNotFoundError) as error:
        raise ConfigError(
            f"runtime.backend is llamacpp, and llama-cpp-python can't be loaded: {error}.",
            hint="Run `CMAKE_ARGS=-DGGML_OPENMP=OFF pip install 'perilune[llamacpp]'`, or set runtime.backend to "
            "torch.",
            param="runtime.backend",
        ) from None
    _log_of(llama_cpp)
    return llama_cpp


def describe_llama_cpp() -> str:
    """Versions, and the instructions that llama.cpp was built with. Raises as `import_llama_cpp` does."""
    library = import_llama_cpp()
    system = library.llama_print_system_info().decode(errors="replace").strip(" |\n")
    return f"llama.cpp {library.llama_version().decode()}, llama-cpp-python {library.__version__} ({system})"


class LlamaContext:
    """A loaded model and its cache of `num_cells` tokens. One thread at a time."""

    def __init__(self, path: Path, *, num_cells: int, max_rows: int, threads: int) -> None:
        """`max_rows` is the most tokens of one `decode`; `threads` 0 is every core this process may use.

        Raises `ConfigError` without llama-cpp-python, `UnsupportedModel` for what llama.cpp can't load,
        `Overloaded` if there is no memory for its cache.
        """
        self._library = library = import_llama_cpp()
        library.llama_backend_init()
        log = _log_of(library)
        log.errors.clear()
        self._model = library.llama_model_load_from_file(os.fsencode(path), library.llama_model_default_params())
        if not self._model:
            reason = log.errors[0].split(": ")[-1] if log.errors else "no reason given"
            raise UnsupportedModel(
                f"llama.cpp can't load {path.name}: {reason}.", hint="Use runtime.backend torch."
            )
        self._sequences = self._count_sequences()
        self._context = library.llama_init_from_model(self._model, self._parameters(num_cells, max_rows, threads))
        if not self._context:
            library.llama_model_free(self._model)
            raise Overloaded(
                f"llama.cpp has no memory for a KV cache of {num_cells:,} tokens.", hint="Lower kv_cache.ram."
            )
        self._memory = library.llama_get_memory(self._context)
        self._batch = _Batch(library, max_rows)
        self._poll = _poll_of(library)
        # A window's cells may be overwritten once they are behind it, unless two sequences have them: each of ours
        # then has a twin.
        self._twin = self._sequences // 2 if library.llama_model_n_swa(self._model) > 0 else 0

    def _parameters(self, num_cells: int, max_rows: int, threads: int) -> Any:
        threads = threads or len(os.sched_getaffinity(0))
        parameters = self._library.llama_context_default_params()
        parameters.n_ctx = num_cells
        parameters.n_batch = parameters.n_ubatch = max_rows
        parameters.n_seq_max = parameters.n_outputs_max = self._sequences
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = self._library.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.kv_unified = True
        parameters.swa_full = True
        parameters.no_perf = True
        return parameters

    def _count_sequences(self) -> int:
        fitting = OUTPUT_BYTES // (4 * self.vocab_size)
        return min(int(self._library.llama_max_parallel_sequences()), max(MIN_SEQUENCES, fitting // 2 * 2))

    @property
    def num_sequences(self) -> int:
        """Sequence ids that may be used: 0 … num_sequences-1. A `decode` gives the logits of as many rows."""
        return self._twin or self._sequences

    @property
    def vocab_size(self) -> int:
        return int(self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(self._model)))

    @property
    def num_layers(self) -> int:
        return int(self._library.llama_model_n_layer(self._model))

    @property
    def trained_tokens(self) -> int:
        return int(self._library.llama_model_n_ctx_train(self._model))

    def decode(self, rows: Sequence[Row], cancelled: CancelFlag) -> dict[int, NDArray[np.float32]] | None:
        """Compute tokens; logits [vocab] by index in `rows`. Positions of a sequence continue what it holds.

        None, between two operations, when the flag says that the step is abandoned or that somebody leaves. Raises
        `InternalError` for any failure. The rows' cells are then undefined.
        """
        library, batch = self._library, self._batch.fill(rows)
        library.llama_set_abort_callback(self._context, self._poll, cancelled.change_address)
        code = library.llama_decode(self._context, batch)
        if code == _ABORTED:
            return None
        if code != 0:
            raise InternalError(f"llama_decode returned {code}.", hint="Report this, with the log.")
        self._copy_to_twins(rows)
        return {index: self._logits(index) for index, row in enumerate(rows) if row.logits}

    def _logits(self, index: int) -> NDArray[np.float32]:
        pointer = self._library.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(pointer, (self.vocab_size,)).copy()

    def _copy_to_twins(self, rows: Sequence[Row]) -> None:
        if not self._twin:
            return
        first: dict[int, int] = {}
        for row in rows:
            first.setdefault(row.sequence, row.position)
        for sequence, start in first.items():
            self._library.llama_memory_seq_cp(self._memory, sequence, sequence + self._twin, start, -1)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """See `llamacpp_rows.Cells`."""
        for row in (target, target + self._twin)[: 2 if self._twin else 1]:
            self._library.llama_memory_seq_cp(self._memory, source, row, start, end)

    def remove(self, row: int, start: int, end: int) -> None:
        """See `llamacpp_rows.Cells`."""
        for each in (row, row + self._twin)[: 2 if self._twin else 1]:
            self._library.llama_memory_seq_rm(self._memory, each, start, end)

    def close(self) -> None:
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)


class _Batch:
    """A `llama_batch` over numpy arrays, filled anew for every call."""

    def __init__(self, library: Any, max_rows: int) -> None:
        self._tokens = np.zeros(max_rows, np.int32)
        self._positions = np.zeros(max_rows, np.int32)
        self._sequences = np.zeros(max_rows, np.int32)
        self._counts = np.ones(max_rows, np.int32)
        self._logits = np.zeros(max_rows, np.int8)
        first, size = self._sequences.ctypes.data, self._sequences.itemsize
        pointers = np.arange(first, first + max_rows * size, size, dtype=np.uintp)
        self._pointers = pointers  # one per token, to its single sequence id
        kinds = dict(library.llama_batch._fields_)
        self._fields = {
            name: ctypes.cast(array.ctypes.data, kinds[name])
            for name, array in (
                ("token", self._tokens),
                ("pos", self._positions),
                ("n_seq_id", self._counts),
                ("seq_id", pointers),
                ("logits", self._logits),
            )
        }
        self._new = library.llama_batch

    def fill(self, rows: Sequence[Row]) -> Any:
        for index, row in enumerate(rows):
            self._tokens[index] = row.token
            self._positions[index] = row.position
            self._sequences[index] = row.sequence
            self._logits[index] = row.logits
        return self._new(n_tokens=len(rows), **self._fields)


def _poll_of(library: Any) -> Any:
    """A native `bool (*)(void *)` that reads a `CancelFlag`: the C library's strlen.

    A Python callback would take the interpreter lock before each of a step's thousand operations, and wait up to
    5 ms for it each time while other threads run. The flag's word is 0 or 1 and little-endian, so as text its
    length is 0 or 1: exactly the bool that is asked for.
    """
    address = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value
    return ctypes.cast(address, library.ggml_abort_callback)  # type: ignore[arg-type]


class _Log:
    """llama.cpp's log, as details of ours. It calls an abandoned step an error, so even errors are that; the last
    ones are kept for whoever raises."""

    def __init__(self, library: Any) -> None:
        self.errors: deque[str] = deque(maxlen=8)
        self._callback = library.llama_log_callback(self._take)  # C keeps no reference
        library.llama_log_set(self._callback, None)

    def _take(self, level: int, text: bytes, user_data: object) -> None:
        line = text.decode(errors="replace").rstrip()
        if level in (_WARNING_LEVEL, _ERROR_LEVEL):
            _LOG.debug("%s", line)
        if level == _ERROR_LEVEL:
            self.errors.append(line)


@functools.cache
def _log_of(library: Any) -> _Log:
    """One for the process, and for good: llama.cpp has one log for all models."""
    return _Log(library)
