"""What is worth waking somebody for: one list, from which Prometheus' rules and Grafana's are made.

Owns: the conditions, how long they must hold, and what a person is told to do. Never touches: how either server
evaluates them.
Invariant: a condition gives a series for each run (and engine, process) that it holds for and none otherwise, in both
servers; each alert names a panel that shows what it is about.
A crash leaves: nothing, it is pure.

Windows and durations suit steps of seconds to half an hour. Thresholds are where a healthy run has not been seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roadstead.dashboards.grafana.board import Board
from roadstead.dashboards.grafana.panels import Panel
from roadstead.dashboards.grafana.queries import EVERY, by, increase, rate
from roadstead.metrics import catalogue as c
from roadstead.metrics.catalogue import Metric

Severity = Literal["critical", "warning", "info"]
"""critical: the run loses work or correctness now. warning: it will, or wastes most of its time. info: where to spend
the next machine."""

WINDOW = "15m"


@dataclass(frozen=True)
class Alert:
    name: str
    severity: Severity
    condition: str
    hold: str
    """How long the condition must hold; a Prometheus duration."""
    labels: tuple[str, ...]
    """Of the condition's series, `run` first."""
    summary: str
    """One line with `{{ $labels.run }}` in it."""
    action: str
    """What it means and what to do."""
    board: Board
    panel: Panel


def of_run(metric: Metric, **labels: str) -> str:
    """A gauge of the run, one series a run, whichever process or attempt serves it."""
    return by("max", EVERY(metric, **labels), "run")


def share(metric: Metric, **labels: str) -> str:
    """Of the window's time, from a counter of seconds."""
    return by("sum", rate(EVERY(metric, **labels), WINDOW), "run")


def happened(metric: Metric, *labels: str, **selected: str) -> str:
    """Whether a counter rose in the window."""
    return f"{by('sum', increase(EVERY(metric, **selected), WINDOW), 'run', *labels)} > 0"


BATCH = f"{of_run(c.ADMISSION_BOUND)} / ({of_run(c.STALENESS_BOUND)} + 1)"
"""Groups of a batch, slots for over-sampling included."""
RUNNING = f"{of_run(c.RUN_PHASE, phase='running')} == 1"
GOES_ON = f"({of_run(c.TARGET_STEPS)} - {of_run(c.POLICY_VERSION)} > {of_run(c.STALENESS_BOUND)} + 1)"
"""There are steps left whose groups are not all admitted: the last S + 1 steps admit nothing."""
OUT = EVERY(c.QUEUE, queue="out")
BEHIND = f"({of_run(c.POLICY_VERSION)} - on (run) group_right () {by('max', EVERY(c.ENGINE_VERSION), 'run', 'engine')})"
SECONDS_A_STEP = f"(900 / (delta({EVERY(c.POLICY_VERSION)}[{WINDOW}]) > 0))"
