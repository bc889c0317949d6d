"""Tokens to text: decoding, stop strings and log probabilities of one choice.

Knows a stream decoder and strings; doesn't know engines, dialects or events' transport. What a model thinks aloud
(`thinking.py`) comes apart from what it says; stop strings and log probabilities are of what it says. Text that may
be the beginning of a stop string is held back, across token borders, until it is known not to be one; a stop string
itself is never part of the output, nor are the log probabilities of tokens that lie wholly in what was cut."""

from __future__ import annotations

from collections import deque

from perilune.core import DecodedLogprob, TokenLogprob
from perilune.service.ports import Tokenizer
from perilune.service.thinking import ThoughtSplitter


class StopScanner:
    """Finds the first of several strings in text that comes in pieces."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def push(self, text: str) -> str:
        """Text that is safe to show. After a stop string was found, nothing more."""
        if self.stopped:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            first, self.found = min(found)
            shown, self._held = self._held[:first], ""
            return shown
        keep = self._possible_start()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back, at the end of the stream."""
        shown, self._held = self._held, ""
        return shown

    def _possible_start(self) -> int:
        """Length of the longest suffix that is the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest


class ChoiceDecoder:
    """One choice's tokens -> what was thought, and (text, log probabilities), as they become showable."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: tuple[str, ...],
        want_logprobs: bool,
        splitter: ThoughtSplitter | None = None,
    ) -> None:
        self._splitter = splitter
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream()
        self._scanner = StopScanner(stops)
        self._want_logprobs = want_logprobs
        self._pending: deque[tuple[int, DecodedLogprob]] = deque()  # (characters up to the token's end, logprob)
        self._decoded_chars = 0
        self._shown_chars = 0
        self._thought = ""

    @property
    def stopped(self) -> bool:
        """A stop string was met: the sequence need not run on."""
        return self._scanner.stopped

    @property
    def stop(self) -> str | None:
        """The stop string that was met."""
        return self._scanner.found

    @property
    def thinking(self) -> bool:
        return self._splitter is not None and self._splitter.thinking

    def thought(self) -> str:
        """What was thought since this was last asked."""
        thought, self._thought = self._thought, ""
        return thought

    def push(self, token_id: int, logprob: TokenLogprob | None) -> tuple[str, tuple[DecodedLogprob, ...]]:
        text = self._stream.push(token_id)
        self._decoded_chars += len(text)
        if self._want_logprobs and logprob is not None:
            self._pending.append((self._decoded_chars, self._decode_logprob(logprob)))
        return self._show(self._scanner.push(self._split(text)))

    def flush(self) -> tuple[str, tuple[DecodedLogprob, ...]]:
        """The rest, when the sequence has ended."""
        if self.stopped:
            return "", ()
        tail = self._stream.flush()
        self._decoded_chars += len(tail)
        said = self._split(tail)
        if self._splitter is not None:
            thought, rest = self._splitter.flush()
            self._thought += thought
            said += rest
            self._skip(len(thought))
        text = self._scanner.push(said)
        return self._show(text if self.stopped else text + self._scanner.flush())

    def _split(self, text: str) -> str:
        """What of a text is said; what is thought waits for `thought`."""
        if self._splitter is None:
            return text
        before = self._decoded_chars - len(text) - self._splitter.held_chars
        thought, said = self._splitter.push(text)
        self._thought += thought
        gone = self._decoded_chars - self._splitter.held_chars - before - len(said)
        self._skip(gone)
        return said

    def _skip(self, chars: int) -> None:
        """Characters that are never shown as text; nor are the log probabilities of their tokens."""
        self._shown_chars += chars
        while chars and self._pending and self._pending[0][0] <= self._shown_chars:
            self._pending.popleft()

    def _show(self, text: str) -> tuple[str, tuple[DecodedLogprob, ...]]:
        self._shown_chars += len(text)
        ready: list[DecodedLogprob] = []
        while self._pending and self._pending[0][0] <= self._shown_chars:
            ready.append(self._pending.popleft()[1])
        return text, tuple(ready)

    def _decode_logprob(self, logprob: TokenLogprob) -> DecodedLogprob:
        def spell(token_id: int) -> tuple[str, bytes]:
            raw = self._tokenizer.token_bytes(token_id)
            return raw.decode("utf-8", errors="replace"), raw

        text, raw = spell(logprob.token_id)
        top = tuple((*spell(token_id), value) for token_id, value in logprob.top)
        return DecodedLogprob(token=text, raw=raw, logprob=logprob.logprob, top=top)
