"""Prometheus metrics: the sink behind `telemetry`, and the table of every name with its meaning.

Knows names, labels and buckets; doesn't know who counts what. Names come out as `perilune_NAME`; where vLLM has the
same quantity it comes out under vLLM's name too, so that existing dashboards work. A name that isn't in the table
is exported all the same, with the labels of its first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics import MetricWrapperBase

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

Kind = Literal["counter", "gauge", "histogram"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 4, 5, 7.5, 10, 20, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
_TOKENS = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
_RATES = (50, 100, 200, 400, 600, 800, 1200, 2000, 4000, 8000, 16000, 64000)
_RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5)


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported quantity. `name` is what `telemetry` is called with; `aliases` are vLLM's names for the same,
    which come out with the label `model_name`, because vLLM's dashboards filter by it."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    aliases: tuple[str, ...] = ()


TABLE: tuple[Metric, ...] = (
    # HTTP
    Metric("http_requests", "counter", "HTTP requests answered.", ("route", "method", "status")),
    Metric("http_request_seconds", "histogram", "Arrival to last byte, by route.", ("route",), _SECONDS),
    Metric("http_requests_open", "gauge", "HTTP requests being served."),
    Metric("http_disconnects", "counter", "Clients that left before their answer was complete.", ("route",)),
    # Answers
    Metric("requests", "counter", "Requests that reached the service.", ("service_class",)),
    Metric("requests_refused", "counter", "Requests refused at admission.", ("reason",)),
    Metric("requests_inside", "gauge", "Answers running or waiting, as admission counts them."),
    Metric("at_peak", "gauge", "1 while contexts are cut because much waits (scheduler.peak_classes)."),
    Metric("answers", "counter", "Chat requests by how they ended: completed, or an error's code.", ("outcome",)),
    Metric(
        "choices_finished",
        "counter",
        "Choices by finish reason.",
        ("finished_reason",),
        aliases=("vllm:request_success",),
    ),
    Metric("plans", "counter", "Plans chosen, by kind.", ("plan",)),
    Metric("deadline", "counter", "Answers by deadline met or missed.", ("outcome", "plan", "service_class")),
    Metric(
        "ttft_seconds",
        "histogram",
        "Last byte of the request to the first token of the answer.",
        ("plan", "service_class"),
        _SECONDS,
        ("vllm:time_to_first_token_seconds",),
    ),
    Metric(
        "time_per_output_token_seconds",
        "histogram",
        "Mean time between the tokens of an answer, after the first.",
        (),
        _TOKEN_SECONDS,
        ("vllm:time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds"),
    ),
    Metric(
        "answer_seconds",
        "histogram",
        "Last byte of the request to the last token of the answer.",
        (),
        _SECONDS,
        ("vllm:e2e_request_latency_seconds",),
    ),
    Metric(
        "ttft_prediction_error_ratio",
        "histogram",
        "Error of the predicted TTFT as a share of the measured one.",
        (),
        _RATIOS,
    ),
    Metric(
        "scheduler_arm_ttft_seconds",
        "histogram",
        "Arrival to first token where policies are compared, by the policy that acted when the request came.",
        ("arm", "service_class"),
        _SECONDS,
    ),
    Metric(
        "scheduler_arm_requests",
        "counter",
        "The same requests by outcome: in_time, late, none (it ended without a token).",
        ("outcome", "arm", "service_class"),
    ),
    Metric(
        "scheduler_shadow",
        "counter",
        "Decisions by whether a shadow would take the same request first: same, other.",
        ("shadow", "first"),
    ),
    Metric(
        "scheduler_shadow_left_out",
        "counter",
        "Requests that only the shadow, or only the acting policy, would not run now.",
        ("by", "shadow"),
    ),
    Metric("ttft_predictions", "counter", "First tokens by whether the predicted p90 held: yes, no.", ("held",)),
    # Tokens
    Metric("prompt_tokens", "counter", "Prompt tokens of completed answers.", aliases=("vllm:prompt_tokens",)),
    Metric("generation_tokens", "counter", "Tokens generated.", aliases=("vllm:generation_tokens",)),
    Metric(
        "cached_prompt_tokens",
        "counter",
        "Prompt tokens found in a cache.",
        aliases=("vllm:prompt_tokens_cached",),
    ),
    Metric(
        "request_prompt_tokens",
        "histogram",
        "Prompt tokens per request.",
        (),
        _TOKENS,
        ("vllm:request_prompt_tokens",),
    ),
    Metric("prefill_tokens_per_second", "histogram", "Measured prefill rate of a chunk.", (), _RATES),
    # Engine
    Metric("sequences_running", "gauge", "Sequences in the batch.", aliases=("vllm:num_requests_running",)),
    Metric("sequences_waiting", "gauge", "Sequences in the queue.", aliases=("vllm:num_requests_waiting",)),
    Metric("queued_prefill_tokens", "gauge", "Prompt tokens that wait to be computed."),
    Metric(
        "kv_cache_usage_ratio", "gauge", "Share of the KV blocks in use.", aliases=("vllm:kv_cache_usage_perc",)
    ),
    Metric("engine_prefill_tokens", "counter", "Prompt tokens computed."),
    Metric("engine_decode_tokens", "counter", "Tokens decoded."),
    Metric("engine_step_seconds", "histogram", "One engine step, by kind.", ("kind",), _TOKEN_SECONDS),
    Metric("engine_steps_abandoned", "counter", "Steps stopped because nobody wanted them any more."),
    Metric("engine_steps_failed", "counter", "Steps that failed."),
    Metric("engine_expired", "counter", "Sequences that ended before their first token: late.", ("service_class",)),
    Metric(
        "engine_cancel_seconds",
        "histogram",
        "From a cancel until nothing more is computed for the sequence and its blocks are back.",
        (),
        _TOKEN_SECONDS,
    ),
    Metric("engine_last_cancel_timestamp_seconds", "gauge", "Unix time at which the last of these ended."),
    Metric("engine_listener_failures", "counter", "Events that a listener couldn't take."),
    Metric(
        "engine_bookkeeping_failures", "counter", "Faults outside a step; each ended only the answer it concerned."
    ),
    Metric(
        "engine_preemptions",
        "counter",
        "Sequences that gave way to others.",
        ("service_class",),
        aliases=("vllm:num_preemptions",),
    ),
    # Tiers of KV
    Metric("kv_tier_bytes", "gauge", "Bytes of KV by tier: hot, warm, cold (on disk), summary.", ("tier",)),
    Metric("kv_idle_bytes", "gauge", "Cached full-precision KV that nobody uses; part of the hot tier."),
    Metric("kv_limit_bytes", "gauge", "What KV may take: its RAM now, and what the system has free."),
    Metric("kv_fragmentation_ratio", "gauge", "Share of the used blocks' places that hold no token."),
    Metric(
        "warm_compression_ratio", "gauge", "1 - INT8 bytes, with summaries, over fp32 bytes of the same tokens."
    ),
    Metric("kv_pressure", "gauge", "0 green, 1 yellow, 2 orange, 3 red: new work is refused."),
    Metric("kv_segments_closed", "counter", "Segments of 2,048 tokens made INT8."),
    Metric("kv_tier_moves", "counter", "Segments moved between RAM and disk.", ("to",)),
    Metric("kv_tier_move_failures", "counter", "Segments that could not be moved; they stayed as they were."),
    Metric("kv_relief_failures", "counter", "Looks at tiers and memory that failed; nothing was moved."),
    Metric(
        "kv_cold_steps", "counter", "Decode steps over segments on disk, by whether they read it.", ("outcome",)
    ),
    Metric("kv_cold_stall_seconds", "histogram", "A step's wait for segments on disk.", (), _TOKEN_SECONDS),
    Metric("kv_reused_tokens", "counter", "Prompt tokens whose KV was found, by where.", ("tier",)),
    # KV between the engine and the disk tier
    Metric("kv_load_seconds", "histogram", "Loading one sequence's KV.", (), _SECONDS),
    Metric("kv_load_failures", "counter", "Loads that failed; the tokens were computed instead."),
    Metric("kv_load_timeouts", "counter", "Loads that took too long; the tokens were computed instead."),
    Metric("kv_save_seconds", "histogram", "Handing KV to the disk tier.", (), _SECONDS),
    Metric("kv_save_failures", "counter", "KV that could not be saved."),
    Metric("kv_save_skipped_blocks", "counter", "Blocks not saved because the writer was behind."),
    # KV on disk
    Metric("kv_disk_loaded_blocks", "counter", "KV blocks read from disk."),
    Metric("kv_disk_saved_blocks", "counter", "KV blocks written to disk."),
    Metric("kv_disk_skipped_blocks", "counter", "KV blocks not written.", ("reason",)),
    Metric("kv_disk_evicted_blocks", "counter", "KV blocks removed to keep the quota."),
    Metric("kv_disk_damaged_blocks", "counter", "KV blocks found damaged and dropped.", ("reason",)),
    Metric("kv_disk_load_failures", "counter", "KV files that could not be opened."),
    Metric("kv_disk_manifest_resets", "counter", "Times the manifest was damaged and started afresh."),
    Metric("kv_disk_swept_files", "counter", "Stray files removed at start."),
    # Backends
    Metric("backend_calls", "counter", "Calls on a backend, by how they ended.", ("backend", "outcome")),
    Metric("backend_ttft_seconds", "histogram", "Call to first text, by backend.", ("backend",), _SECONDS),
    Metric("backend_cost", "counter", "Cost of answers by the configured prices.", ("backend",)),
    Metric("backend_ejections", "counter", "Times a backend went out of service, by why.", ("backend", "reason")),
    Metric("backend_probes", "counter", "Health checks of a backend, by how they ended.", ("backend", "outcome")),
    Metric("backend_available", "gauge", "1 while a backend is in service.", ("backend",)),
    Metric("overflows", "counter", "Questions to the local engine that a backend answered.", ("reason",)),
    Metric(
        "usage_unsaved",
        "counter",
        "Times that the usage of keys could not be stored; it is kept for the next time.",
    ),
    Metric("privacy_taken_out", "counter", "Identifiers taken out of text for backends.", ("kind",)),
    Metric(
        "answer_cache", "counter", "Answers looked for that were given before, by how that ended.", ("outcome",)
    ),
    # Documents
    Metric("files_uploaded", "counter", "Files stored."),
    Metric(
        "feedback",
        "counter",
        "Answers rated by people; a rating that took another's place counts, too.",
        ("rating", "reason"),
    ),
    Metric("turns_lost", "counter", "Times that a session's turns could not be stored."),
    Metric("files_ingested", "counter", "Files whose ingest ended.", ("status",)),
    Metric("batches_ended", "counter", "Batches that ended.", ("status",)),
    Metric("batch_lines", "counter", "Lines of batches that were answered.", ("status",)),
    Metric("batch_lines_put_off", "counter", "Tries of lines that are tried again.", ("code",)),
    Metric("ingest_prefill_failed", "counter", "Documents whose KV could not be computed ahead."),
)
"""Every metric. docs/api.md explains how to read them; a test keeps the two equal."""


M = TypeVar("M", bound=MetricWrapperBase)


class _Family(Generic[M]):
    """One quantity under all its names. Missing labels are empty, unknown ones are dropped."""

    def __init__(self, labels: tuple[str, ...], own: M, aliases: tuple[M, ...], model_name: str) -> None:
        self._labels = labels
        self._own = own
        self._aliases = aliases
        self._model_name = model_name
        self._children: dict[tuple[str, ...], tuple[M, ...]] = {}

    def children(self, labels: Mapping[str, str]) -> tuple[M, ...]:
        values = tuple(labels.get(name, "") for name in self._labels)
        if values not in self._children:
            own = self._own.labels(*values) if values else self._own
            aliases = [alias.labels(*values, self._model_name) for alias in self._aliases]
            self._children[values] = (own, *aliases)
        return self._children[values]


class PrometheusSink:
    """A `telemetry.Sink` with a registry of its own. Thread-safe; calls take a few microseconds."""

    def __init__(self, model_name: str, table: Iterable[Metric] = TABLE) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._probes: list[Callable[[], None]] = []
        self._counters: dict[str, _Family[Counter]] = {}
        self._gauges: dict[str, _Family[Gauge]] = {}
        self._histograms: dict[str, _Family[Histogram]] = {}
        for metric in table:
            if metric.kind == "counter":
                self._counter(metric)
            elif metric.kind == "gauge":
                self._gauge(metric)
            else:
                self._histogram(metric)

    def count(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        name = name.removesuffix("_total")  # Prometheus adds it to every counter
        family = self._counters.get(name) or self._counter(_unlisted(name, "counter", labels))
        for child in family.children(labels):
            child.inc(value)

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        family = self._histograms.get(name) or self._histogram(_unlisted(name, "histogram", labels))
        for child in family.children(labels):
            child.observe(value)

    def gauge(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        family = self._gauges.get(name) or self._gauge(_unlisted(name, "gauge", labels))
        for child in family.children(labels):
            child.set(value)

    def before_render(self, probe: Callable[[], None]) -> None:
        """Call `probe` before every rendering: for gauges that are cheaper to ask for than to keep up to date."""
        self._probes.append(probe)

    def render(self) -> bytes:
        """Everything, in Prometheus' text format (`CONTENT_TYPE`)."""
        for probe in self._probes:
            probe()
        return generate_latest(self._registry)

    def _counter(self, metric: Metric) -> _Family[Counter]:
        def make(name: str, labels: tuple[str, ...]) -> Counter:
            return Counter(name, metric.help, labels, registry=self._registry)

        return self._family(self._counters, metric, make)

    def _gauge(self, metric: Metric) -> _Family[Gauge]:
        def make(name: str, labels: tuple[str, ...]) -> Gauge:
            return Gauge(name, metric.help, labels, registry=self._registry)

        return self._family(self._gauges, metric, make)

    def _histogram(self, metric: Metric) -> _Family[Histogram]:
        def make(name: str, labels: tuple[str, ...]) -> Histogram:
            buckets = metric.buckets or _SECONDS
            return Histogram(name, metric.help, labels, registry=self._registry, buckets=buckets)

        return self._family(self._histograms, metric, make)

    def _family(
        self, known: dict[str, _Family[M]], metric: Metric, make: Callable[[str, tuple[str, ...]], M]
    ) -> _Family[M]:
        with self._lock:
            if metric.name not in known:
                own = make(f"perilune_{metric.name}", metric.labels)
                aliases = tuple(make(name, (*metric.labels, "model_name")) for name in metric.aliases)
                known[metric.name] = _Family(metric.labels, own, aliases, self._model_name)
            return known[metric.name]


def _unlisted(name: str, kind: Kind, labels: Mapping[str, str]) -> Metric:
    return Metric(name, kind, "Not described.", tuple(sorted(labels)))
