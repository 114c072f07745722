"""PromQL from the catalogue's metrics.

Owns: the spelling of selectors and of the few shapes of query that panels and alerts are made of. Never touches: what
they are drawn or judged by.
Invariant: a query names only metrics of the catalogue and of vLLM (below), with labels and values that they have: a
misspelt one is an error when the module is imported, not an empty panel.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from roadstead.metrics.catalogue import AS_THEY_COME, Metric

TARGET_LABELS = frozenset({"run", "role", "engine"})
"""Labels of the scrape target: every metric has them, `engine` only those of an engine's own."""
_SUFFIXES = {"histogram": frozenset({"_bucket", "_sum", "_count"})}

RATE = "$__rate_interval"
"""Grafana's: at least four scrapes, whatever the width of the panel."""


@dataclass(frozen=True)
class Scope:
    """Which runs a query is about."""

    fixed: str

    def __call__(self, metric: Metric, suffix: str = "", /, **labels: str) -> str:
        """A selector. labels: of the metric; a value that begins with ~ is a regular expression of alternatives."""
        if suffix not in _SUFFIXES.get(metric.kind, {""}):
            raise ValueError(f"{metric.name} is a {metric.kind}, there is no {metric.name}{suffix}")
        parts = [self.fixed] if self.fixed else []
        for label, value in labels.items():
            known = metric.labels.get(label, AS_THEY_COME)
            values = value.removeprefix("~").split("|")
            if label not in metric.labels.keys() | TARGET_LABELS or (known and not set(values) <= set(known)):
                raise ValueError(f"{metric.name} has no {label}={value!r}; it has {dict(metric.labels)}")
            parts.append(f'{label}{"=~" if value.startswith("~") else "="}"{value.removeprefix("~")}"')
        return f"{metric.name}{suffix}" + (f"{{{','.join(parts)}}}" if parts else "")


RUN = Scope('run="$run"')
"""The run that is chosen on the dashboard."""
EVERY = Scope("")
"""Alerts judge every run, each by itself."""


def by(aggregation: str, expression: str, *labels: str) -> str:
    return f"{aggregation} by ({', '.join(labels)}) ({expression})"


def rate(selector: str, window: str = RATE) -> str:
    return f"rate({selector}[{window}])"


def increase(selector: str, window: str) -> str:
    return f"increase({selector}[{window}])"


def mean(metric: Metric, *labels: str, scope: Scope = RUN, window: str = RATE, **selected: str) -> str:
    """Of a histogram's observations. No series while there are none, rather than NaN."""
    seconds = by("sum", rate(scope(metric, "_sum", **selected), window), *labels)
    count = by("sum", rate(scope(metric, "_count", **selected), window), *labels)
    return f"{seconds} / ({count} > 0)"


def quantile(q: float, metric: Metric, *labels: str, scope: Scope = RUN, window: str = RATE, **selected: str) -> str:
    """Of a histogram's observations, interpolated in its bucket."""
    buckets = by("sum", rate(scope(metric, "_bucket", **selected), window), "le", *labels)
    return f"histogram_quantile({q:g}, {buckets})"


# What vLLM itself serves and a panel shows; our own metrics say nothing about an engine's inside. Its names have a
# colon and counters get _total from its client library.
VLLM_RUNNING = Metric("vllm:num_requests_running", "gauge", "requests", "rollout", "Requests in the running batch.")
VLLM_WAITING = Metric("vllm:num_requests_waiting", "gauge", "requests", "rollout", "Requests that wait for a place.")
VLLM_CACHE = Metric("vllm:kv_cache_usage_perc", "gauge", "ratio", "rollout", "KV cache in use; 1 is all of it.")
VLLM_TOKENS = Metric("vllm:generation_tokens_total", "counter", "tokens", "rollout", "Tokens generated.")
VLLM_PREEMPTIONS = Metric("vllm:num_preemptions_total", "counter", "requests", "rollout", "Requests put back.")
VLLM_LATENCY = Metric("vllm:request_inference_time_seconds", "histogram", "seconds", "rollout", "Time in the batch.")
VLLM_METRICS = (VLLM_RUNNING, VLLM_WAITING, VLLM_CACHE, VLLM_TOKENS, VLLM_PREEMPTIONS, VLLM_LATENCY)
