"""What one worker process shows of itself: its own metrics, and those of the Temporal SDK in it.

Owns: the process's two scrape targets. Never touches: values.
Invariant: with `metrics.enabled: false` nothing listens; with it, what can't listen is a warning.
A crash leaves: two target files that nobody answers (metrics/server.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import structlog
from temporalio.runtime import PrometheusConfig, Runtime, TelemetryConfig

from roadstead.config import RunConfig
from roadstead.metrics.registry import Metrics
from roadstead.metrics.server import LOOPBACK, TEMPORAL, free_port, last_port, served, target

log = structlog.get_logger(__name__)


@contextlib.contextmanager
def shown(config: RunConfig, folder: Path, metrics: Metrics) -> Iterator[Runtime | None]:
    """Serve for the length of the block. Yields the runtime for the process's Temporal client; None: the default."""
    if not config.metrics.enabled:
        yield None
        return
    labels = {"run": config.name, "role": metrics.role}
    with contextlib.ExitStack() as stack:
        stack.enter_context(served(metrics.registry, folder, labels))
        name = f"{metrics.role}-temporal"
        runtime = None
        try:
            address = f"{LOOPBACK}:{free_port(last_port(folder, name))}"
            runtime = _runtime(address)
        except (OSError, RuntimeError, ValueError) as error:
            log.warning("metrics.not_served", role=metrics.role, of="the Temporal SDK", error=str(error))
        else:
            stack.enter_context(target(folder, name, address, TEMPORAL, labels))
        yield runtime


def _runtime(address: str) -> Runtime:
    """One that serves the SDK's metrics there, in Prometheus' conventions: seconds, units and _total in the names."""
    serving = PrometheusConfig(address, counters_total_suffix=True, unit_suffix=True, durations_as_seconds=True)
    return Runtime(telemetry=TelemetryConfig(metrics=serving))
