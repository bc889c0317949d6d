"""The MRI's thread rules under load (docs/mri.md): one thread steps, every other call is refused or done whole.

Subclass `MRIThreadContract` beside `MRIContract`. The long form runs in `make soak`.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from perilune.errors import InvalidStateError
from perilune.runtime.mri import CancelFlag, ModelRuntime, SequenceSlice, StepAbandoned, StepPlan
from tests.contracts.mri import Make
from tests.contracts.mri_tools import (
    GREEDY,
    PROMPT,
    Draw,
    assert_same,
    draws,
    generate,
    long_prompt,
    piece,
    run,
    watched,
)

SHORT_S, LONG_S = 2.0, 600.0
_SPARE = 3  # blocks that the stress evicts while others are in use


class MRIThreadContract:
    """Needs what `MRIContract` needs, and its fixtures."""

    @pytest.fixture(scope="class")
    def make(self) -> Make:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def shared_runtime(self, make: Make) -> Iterator[ModelRuntime]:
        runtime = make()
        yield runtime
        runtime.close()

    @pytest.fixture
    def runtime(self, shared_runtime: ModelRuntime) -> Iterator[ModelRuntime]:
        yield shared_runtime
        shared_runtime.evict_kv(range(shared_runtime.num_blocks))

    def test_calls_during_a_step_are_refused(self, runtime: ModelRuntime) -> None:
        prompt, table = long_prompt(runtime)
        expected = generate(runtime, "a", prompt, table, count=1)
        calls: dict[str, Callable[[], object]] = {
            "forward_step": lambda: runtime.forward_step(StepPlan(()), CancelFlag()),
            "init_context": lambda: runtime.init_context("other", PROMPT, GREEDY),
            "release_context": lambda: runtime.release_context("other"),
            "evict_kv": lambda: runtime.evict_kv([]),
        }
        if runtime.capabilities.kv_summary:
            calls["get_kv_summary"] = lambda: runtime.get_kv_summary()
        refused: set[str] = set()
        done = threading.Event()

        def interfere() -> None:
            for name in itertools.cycle(calls):
                if done.is_set():
                    return
                try:
                    calls[name]()
                    if name == "init_context":
                        calls["release_context"]()
                except InvalidStateError:
                    refused.add(name)
                time.sleep(0.0002)

        runtime.init_context("a", prompt, watched(runtime))
        thread = threading.Thread(target=interfere)
        thread.start()
        try:
            for _ in range(500):
                try:
                    result = run(runtime, piece("a", prompt, 0, table, sample=True))
                except InvalidStateError:  # a call of the other thread was under way
                    continue
                assert_same(runtime, [draws(result)["a"]], expected)
                if refused == set(calls):
                    break
        finally:
            done.set()
            thread.join()
        assert refused == set(calls), "these never fell into a step, or weren't refused"
        runtime.release_context("other")
        runtime.release_context("a")

    def test_close_during_a_step_is_refused(self, make: Make) -> None:
        for _ in range(10):
            runtime = make()
            prompt, table = long_prompt(runtime)
            runtime.init_context("a", prompt, GREEDY)
            with ThreadPoolExecutor(1) as pool:
                outcome = pool.submit(_outcome, runtime, prompt, table)
                time.sleep(0.002)
                try:
                    runtime.close()
                except InvalidStateError:
                    assert isinstance(outcome.result(), int), outcome
                    runtime.close()
                    return
            # closed before or after the step: try again
        pytest.fail("no call of close fell into a step")

    def test_many_contexts_beside_evictions(self, runtime: ModelRuntime) -> None:
        _Stress(runtime, SHORT_S).run()

    @pytest.mark.soak
    def test_many_contexts_beside_evictions_for_long(self, runtime: ModelRuntime) -> None:
        _Stress(runtime, LONG_S).run()


def _outcome(runtime: ModelRuntime, prompt: list[int], table: list[int]) -> object:
    try:
        return run(runtime, piece("a", prompt, 0, table, sample=True)).tokens["a"]
    except InvalidStateError as error:
        return error


@dataclass(slots=True)
class _Stream:
    """A context of the stress: a prompt of known answer, somewhere in its life."""

    name: str
    kind: int
    table: list[int]
    computed: int = 0
    found: list[Draw] = field(default_factory=list)


class _Stress:
    """One thread steps contexts that come and go, are cancelled and share prefixes; two others call all the time.

    Every answer is compared with what the prompt gives alone.
    """

    def __init__(self, runtime: ModelRuntime, seconds: float) -> None:
        self._runtime = runtime
        self._seconds = seconds
        self._random = random.Random(7)
        self._prompts = [PROMPT, PROMPT[5:], PROMPT[:64] + PROMPT[3:9], PROMPT[:40]]
        self._alone = [generate(runtime, "alone", prompt, [0, 1, 2], count=4) for prompt in self._prompts]
        runtime.evict_kv([0, 1, 2])
        self._free = list(range(runtime.num_blocks - _SPARE))
        self._spare = list(range(runtime.num_blocks - _SPARE, runtime.num_blocks))
        self._streams: list[_Stream] = []
        self._serial = itertools.count()
        self._finished = 0
        self._faults: list[BaseException] = []
        self._done = threading.Event()
        self._flag = CancelFlag()

    def run(self) -> None:
        others = [threading.Thread(target=self._guarded, args=(call,)) for call in (self._meddle, self._cancel)]
        for thread in others:
            thread.start()
        deadline_s = time.monotonic() + self._seconds
        try:
            while time.monotonic() < deadline_s and not self._faults:
                self._turn()
        finally:
            self._done.set()
            for thread in others:
                thread.join()
        assert not self._faults, self._faults
        assert self._finished > 3, "the stress finished next to nothing"
        for stream in list(self._streams):
            self._leave(stream)
        if self._runtime.capabilities.kv_summary:
            assert self._runtime.get_kv_summary().resident_bytes == 0

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            while not self._done.is_set():
                call()
                time.sleep(0.0003)
        except BaseException as error:  # shown by the main thread
            self._faults.append(error)

    def _meddle(self) -> None:
        """Calls that are legal between steps and refused during one; never anything in between."""
        for call in (
            lambda: self._runtime.evict_kv(self._spare),
            lambda: self._runtime.release_context("nobody"),
            self._runtime.get_kv_summary if self._runtime.capabilities.kv_summary else lambda: None,
        ):
            try:
                call()
            except InvalidStateError:
                continue

    def _cancel(self) -> None:
        if self._random.random() < 0.02:
            self._flag.set()

    def _turn(self) -> None:
        while len(self._free) >= 3 and len(self._streams) < 4:
            self._join()
        slices = [self._slice(stream) for stream in self._streams]
        try:
            result = self._runtime.forward_step(StepPlan(tuple(slices)), self._flag)
        except StepAbandoned:
            self._flag.clear()
            return
        except InvalidStateError:  # the other thread's call was under way
            return
        found = draws(result)
        for stream, piece_ in zip(list(self._streams), slices, strict=True):
            stream.computed = piece_.end
            if stream.name in found:
                stream.found.append(found[stream.name])
            if len(stream.found) == len(self._alone[stream.kind]) or self._random.random() < 0.02:
                self._leave(stream)

    def _slice(self, stream: _Stream) -> SequenceSlice:
        prompt, answer = self._prompts[stream.kind], self._alone[stream.kind]
        tokens = [*prompt, *(token for token, _ in answer)]
        size = min(self._random.choice((1, 7, 32, 70)), max(1, len(prompt) - stream.computed))
        end = stream.computed + size
        last = end >= len(prompt)
        return piece(stream.name, tokens[stream.computed : end], stream.computed, stream.table, sample=last)

    def _join(self) -> None:
        stream = _Stream(f"s{next(self._serial)}", self._random.randrange(4), [self._free.pop() for _ in range(3)])
        self._patiently(lambda: self._runtime.init_context(stream.name, PROMPT, watched(self._runtime)))
        self._streams.append(stream)

    def _leave(self, stream: _Stream) -> None:
        assert_same(self._runtime, stream.found, self._alone[stream.kind][: len(stream.found)])
        self._finished += 1
        self._streams.remove(stream)
        self._patiently(lambda: self._runtime.release_context(stream.name))
        self._patiently(lambda: self._runtime.evict_kv(stream.table))
        self._free += stream.table

    def _patiently(self, call: Callable[[], object]) -> None:
        """The other thread's call may be under way: it takes microseconds."""
        while True:
            try:
                call()
                return
            except InvalidStateError as error:
                if "running" not in str(error):
                    raise
                time.sleep(0.0001)
