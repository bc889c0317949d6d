"""Prometheus metrics: the sink behind `telemetry`, and the table of every name with its meaning.

Knows names, labels and buckets; doesn't know who counts what. Names come out as `perilune_NAME`; where vLLM has the
same quantity it comes out under vLLM's name too, so that existing dashboards work. A name that isn't in the table
is exported all the same, with the labels of its first use.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

Kind = Literal["counter", "gauge", "histogram"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 4, 5, 7.5, 10, 20, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
_TOKENS = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
_RATES = (50, 100, 200, 400, 600, 800, 1200, 2000, 4000, 8000, 16000, 64000)
_RATIOS = (-1, -0.5, -0.2, -0.1, -0.05, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported quantity. `name` is what `telemetry` is called with, `aliases` are further exported names."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def exported(self) -> tuple[str, ...]:
        """Every name it comes out under."""
        return (f"perilune_{self.name}", *self.aliases)


TABLE: tuple[Metric, ...] = (
    Metric("http_requests", "counter", "HTTP requests answered.", ("route", "method", "status")),
    Metric("http_request_seconds", "histogram", "Arrival to last byte, by route.", ("route",), _SECONDS),
    Metric("http_requests_open", "gauge", "HTTP requests being served."),
    Metric("http_disconnects", "counter", "Clients that left before their answer was complete.", ("route",)),
)


M = TypeVar("M", Counter, Gauge, Histogram)


class _Family(Generic[M]):
    """One quantity under all its names. Missing labels are empty, unknown ones are dropped."""

    def __init__(self, labels: tuple[str, ...], metrics: tuple[M, ...]) -> None:
        self._labels = labels
        self._metrics: tuple[M, ...] = metrics
        self._children: dict[tuple[str, ...], tuple[M, ...]] = {}

    def children(self, labels: Mapping[str, str]) -> tuple[M, ...]:
        values = tuple(labels.get(name, "") for name in self._labels)
        if values not in self._children:
            self._children[values] = tuple(metric.labels(*values) if values else metric for metric in self._metrics)
        return self._children[values]


class PrometheusSink:
    """A `telemetry.Sink` with a registry of its own. Thread-safe; calls take a few microseconds."""

    def __init__(self, table: Iterable[Metric] = TABLE) -> None:
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
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

    def render(self) -> bytes:
        """Everything, in Prometheus' text format (`CONTENT_TYPE`)."""
        return generate_latest(self._registry)

    def _counter(self, metric: Metric) -> _Family[Counter]:
        with self._lock:
            if metric.name not in self._counters:
                made = tuple(
                    Counter(name, metric.help, metric.labels, registry=self._registry) for name in metric.exported
                )
                self._counters[metric.name] = _Family(metric.labels, made)
            return self._counters[metric.name]

    def _gauge(self, metric: Metric) -> _Family[Gauge]:
        with self._lock:
            if metric.name not in self._gauges:
                made = tuple(
                    Gauge(name, metric.help, metric.labels, registry=self._registry) for name in metric.exported
                )
                self._gauges[metric.name] = _Family(metric.labels, made)
            return self._gauges[metric.name]

    def _histogram(self, metric: Metric) -> _Family[Histogram]:
        with self._lock:
            if metric.name not in self._histograms:
                buckets = metric.buckets or _SECONDS
                made = tuple(
                    Histogram(name, metric.help, metric.labels, registry=self._registry, buckets=buckets)
                    for name in metric.exported
                )
                self._histograms[metric.name] = _Family(metric.labels, made)
            return self._histograms[metric.name]


def _unlisted(name: str, kind: Kind, labels: Mapping[str, str]) -> Metric:
    return Metric(name, kind, "Not described.", tuple(sorted(labels)))
