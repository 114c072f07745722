"""The first page: is the run alive, does it learn, and what holds it up."""

from __future__ import annotations

from roadstead.dashboards.grafana.board import Board
from roadstead.dashboards.grafana.boards import data, engines, faults, staleness, trainer
from roadstead.dashboards.grafana.panels import COUNT, PER_HOUR, PLAIN, SHARE, Query, graph, number
from roadstead.dashboards.grafana.queries import RUN, by
from roadstead.metrics import catalogue as c

PHASE = number(
    "Phase",
    PLAIN,
    "What the run is doing. Healthy: running.",
    Query(f"{by('max', RUN(c.RUN_PHASE), 'phase')} == 1", "{{phase}}"),
    names_only=True,
)
ATTEMPT = number(
    "Attempt",
    PLAIN,
    "1 is the first start; every resume adds one.",
    Query(by("max", RUN(c.ATTEMPT), "run"), "attempt"),
    width=3,
)
VERSION = number(
    "Policy version",
    PLAIN,
    "Steps that are published. Healthy: it moves.",
    Query(by("max", RUN(c.POLICY_VERSION), "run"), "version"),
    width=3,
)
PROGRESS = number(
    "Of the step target",
    SHARE,
    "Steps published, of training.steps.",
    Query(f"{by('max', RUN(c.POLICY_VERSION), 'run')} / {by('max', RUN(c.TARGET_STEPS), 'run')}", "done"),
)
ALERTS = number(
    "Alerts that fire",
    COUNT,
    "Prometheus' alerts about this run. Healthy: 0. Which ones: the marks on the charts, or the alert list.",
    Query(f'count(ALERTS{{alertstate="firing",{RUN.fixed}}}) or vector(0)', "alerts"),
    steps=(1.0, 3.0),
)
PACE = graph(
    "Steps an hour",
    PER_HOUR,
    "Over the last ten minutes. Healthy: steady; it falls when responses get longer.",
    Query(f"{by('max', f'deriv({RUN(c.POLICY_VERSION)}[10m])', 'run')} * 3600", "steps"),
)

BOARD = Board(
    "roadstead-overview",
    "Roadstead: run overview",
    "Is the run alive, does it learn, and what holds it up.",
    (
        ("Now", (PHASE, ATTEMPT, VERSION, PROGRESS, faults.SILENT, ALERTS)),
        ("Does it learn", (data.REWARD, data.TRAINABLE)),
        ("Does it keep up", (PACE, engines.TOKENS, staleness.QUEUE, trainer.PHASES, staleness.AGES, staleness.WAITING)),
        ("Is it well", (faults.PROCESSES, faults.KINDS)),
    ),
)
