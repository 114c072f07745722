"""What holds the values of one process's metrics.

Owns: the prometheus_client objects made from the catalogue. Never touches: sockets, what the values mean.
Invariant: only what the catalogue declares can be set, with exactly its labels; a process serves the metrics of its
own role and no others.
A crash leaves: nothing; counters begin at 0 again, which is what Prometheus expects of a restarted process.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector

from roadstead.metrics.catalogue import CATALOGUE, Metric

# A series for the time of creation of each counter and histogram doubles what is scraped and tells nothing here.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

_Kind = TypeVar("_Kind", Counter, Gauge, Histogram)


class Metrics:
    """Thread-safe. Values can be set whether or not anybody serves them."""

    def __init__(self, role: str, catalogue: Iterable[Metric] = CATALOGUE) -> None:
        """role: of the process; it has the metrics of that role and those of every worker."""
        self.role = role
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._served: set[str] = set()
        self._lock = threading.Lock()
        for metric in catalogue:
            if metric.role in {role, "every"}:
                self._make(metric)
                if metric.kind != "gauge" and all(metric.labels.values()):
                    self.begin(metric)

    def begin(self, metric: Metric, **values: str) -> None:
        """Make the series of a counter or histogram, at 0. values: of labels that the catalogue has no values for."""
        if not metric.labels:
            return  # it has one series, from the beginning
        made = self._counters.get(metric.name) or self._histograms[metric.name]
        known = [(values[name],) if name in values else metric.labels[name] for name in metric.labels]
        for combination in itertools.product(*known):
            made.labels(*combination)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        self._gauge(metric, labels).set(value)

    def shift(self, metric: Metric, amount: float, **labels: str) -> None:
        """Move a gauge."""
        self._gauge(metric, labels).inc(amount)

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Raise a counter."""
        _series(self._counters, metric, labels).inc(amount)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        _series(self._histograms, metric, labels).observe(value)

    def text(self) -> str:
        """What a scrape gets, in the text format."""
        return prometheus_client.generate_latest(self.registry).decode()

    def _gauge(self, metric: Metric, labels: dict[str, str]) -> Gauge:
        """Served from now on: before its first value it would say 0 and be wrong."""
        with self._lock:
            if metric.name not in self._served:
                self._served.add(metric.name)
                self.registry.register(self._gauges[metric.name])
        return _series(self._gauges, metric, labels)

    def _make(self, metric: Metric) -> None:
        name, text, labels = metric.name, metric.help, tuple(metric.labels)
        match metric.kind:
            case "counter":
                self._counters[name] = Counter(name, text, labels, unit=metric.unit, registry=self.registry)
            case "gauge":
                self._gauges[name] = Gauge(name, text, labels, unit=metric.unit, registry=None)
            case "histogram":
                self._histograms[name] = Histogram(
                    name, text, labels, unit=metric.unit, registry=self.registry, buckets=metric.buckets
                )


def _series(made: dict[str, _Kind], metric: Metric, labels: dict[str, str]) -> _Kind:
    series = made[metric.name]
    return series.labels(**labels) if labels or metric.labels else series
