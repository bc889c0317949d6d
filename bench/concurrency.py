"""Four streams at once, 2K tokens of prompt and 128 new ones each: `perilune serve` against `llama-server`.

    python -m bench.concurrency [--quick] [--json FILE]

Wall time from the first request until the last stream has ended, prefill and HTTP included, on the same GGUF with
two threads. Every stream of every round has a text of its own, the same for both servers. Greedy; the end marker is
ignored, and a round fails unless every stream got its 128 tokens and nothing but the few tokens with which all
chats begin came from a cache. `*_wall_s` are medians; `*_ttft_s` is the median of the streams' first tokens. A full
run takes about five minutes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

from tokenizers import Tokenizer

from bench import peers
from bench.driver import OURS, Machine, Reading, interleave, say
from bench.report import Bar, Result, begin, compare, finish, parse_options, ratios
from bench.server import Answer, LlamaServer, PeriluneServer, ServerError, ServerProcess
from bench.speed import THREADS, add_recorded, live_engines, tape

LLAMACPP = "llamacpp_server"
ENGINES = (OURS, LLAMACPP)
BARS = {"vs_llamacpp_4x2k": Bar(at_least=1.5)}
STREAMS, PROMPT_TOKENS, NEW_TOKENS = 4, 2048, 128

_WHAT = "concurrent_4x2k"
_TEMPLATE_TOKENS = 48  # around a chat's text, at most
_QUICK_ROUNDS = 2
_LLAMACPP_ARGUMENTS = (
    *("--parallel", str(STREAMS), "--ctx-size", str(STREAMS * (PROMPT_TOKENS + NEW_TOKENS + 128))),
    *("--threads", str(THREADS), "--threads-batch", str(THREADS), "--batch-size", "2048", "--ubatch-size", "512"),
    *("--flash-attn", "on", "--cont-batching", "--cache-ram", "0"),
)
"""Batches as it has them by default; nothing was tuned. `--cache-ram 0` spares it copies that nobody asks for."""


class Rounds:
    """Plays rounds of streams, `prompts[round][stream]`, and keeps when the first tokens came."""

    def __init__(self, prompts: Sequence[Sequence[str]]) -> None:
        self._prompts = prompts
        self._prompt_tokens: dict[int, int] = {}  # by round, as the first server counted them
        self.ttft_s: dict[int, list[float]] = {}

    def turn(self, server: ServerProcess, number: int) -> tuple[int, float]:
        """Tokens that were generated, and wall seconds."""
        prompts = self._prompts[number]
        begun_s = perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            try:
                answers = list(pool.map(lambda prompt: stream(server, prompt), prompts))
            except BaseException:
                server.kill()  # else the other streams would be waited for
                raise
        seconds = perf_counter() - begun_s
        for answer in answers:
            check(answer)
        count = sum(answer.usage["prompt_tokens"] for answer in answers)
        if abs(self._prompt_tokens.setdefault(number, count) - count) > _TEMPLATE_TOKENS:
            raise ServerError(f"the servers read {self._prompt_tokens[number]} and {count} tokens of one prompt")
        self.ttft_s.setdefault(server.port, []).append(median(a.ttft_s or a.total_s for a in answers))
        return len(answers) * NEW_TOKENS, seconds


def stream(server: ServerProcess, prompt: str) -> Answer:
    usage = {"include_usage": True}
    return server.ask(prompt, max_tokens=NEW_TOKENS, ignore_eos=True, stream_options=usage)


def check(answer: Answer) -> None:
    """Raises `ServerError` unless the stream had the sizes that both sides must have, and was computed."""
    usage = answer.usage
    if usage.get("completion_tokens") != NEW_TOKENS:
        raise ServerError(f"a stream did not get {NEW_TOKENS} tokens: {usage}")
    if abs(usage["prompt_tokens"] - PROMPT_TOKENS) > _TEMPLATE_TOKENS:
        raise ServerError(f"a prompt is not of {PROMPT_TOKENS} tokens: {usage}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if cached > _TEMPLATE_TOKENS:
        raise ServerError(f"{cached} tokens of a fresh prompt came from a cache")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("Four streams at once against llama.cpp's server.", argv, engines=ENGINES)
    rounds = _QUICK_ROUNDS if options.quick else options.rounds
    machine = Machine(THREADS)
    try:
        with started(live_engines(options)) as servers:
            played = Rounds(texts(rounds + 1))
            for name, server in servers.items():
                tokens, seconds = played.turn(server, rounds)  # warms up
                say(f"{name} warm, {tokens / seconds:.1f} tokens/s")
            played.ttft_s.clear()
            readings = interleave(servers, rounds, _WHAT, played.turn, machine)
            first_s = {name: played.ttft_s[server.port] for name, server in servers.items()}
        recorded = add_recorded(readings, options, [_WHAT], "gemm_gflops", machine)
    finally:
        machine.close()
    result = begin("concurrency", readings, machine.calibration, options, recorded=recorded)
    compare(result, "vs_llamacpp_4x2k", ratios(readings, LLAMACPP, _WHAT))
    _enter_seconds(result, readings, first_s)
    finish(result, BARS, options)


def _enter_seconds(result: Result, readings: Sequence[Reading], first_s: dict[str, list[float]]) -> None:
    for engine in ENGINES:
        compare(result, f"{engine}_wall_s", [r.seconds for r in readings if r.engine == engine])
    for engine, seconds in first_s.items():
        compare(result, f"{engine}_ttft_s", seconds)


@contextmanager
def started(engines: Sequence[str]) -> Iterator[dict[str, ServerProcess]]:
    """Both servers, ready, in homes of their own that are gone afterwards."""
    with ExitStack() as stack:
        servers: dict[str, ServerProcess] = {}
        for engine in engines:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perilune-bench-")))
            servers[engine] = (
                LlamaServer(home, *_LLAMACPP_ARGUMENTS) if engine == LLAMACPP else PeriluneServer(home)
            )
            stack.callback(servers[engine].stop)
            say(f"{engine} ready in {servers[engine].start():.1f} s")
        yield servers


def texts(rounds: int) -> list[list[str]]:
    """For every round as many texts as there are streams; with a chat's template about `PROMPT_TOKENS` each."""
    tokenizer: Tokenizer = Tokenizer.from_file(str(peers.model_safetensors() / "tokenizer.json"))
    tokens = tape()
    size = PROMPT_TOKENS - _TEMPLATE_TOKENS // 2
    return [[tokenizer.decode(tokens.take(size)) for _ in range(STREAMS)] for _ in range(rounds)]


if __name__ == "__main__":
    main()
