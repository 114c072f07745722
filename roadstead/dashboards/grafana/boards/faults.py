"""The dashboard of faults: what failed, who does not answer, and what was tried again."""

from __future__ import annotations

from roadstead.dashboards.grafana.board import Board
from roadstead.dashboards.grafana.boards import engines, trainer
from roadstead.dashboards.grafana.panels import COUNT, PER_SECOND, PLAIN, Query, graph, number
from roadstead.dashboards.grafana.queries import RUN, by, quantile, rate
from roadstead.metrics import catalogue as c

SILENT = number(
    "The run answered",
    "s",
    "How long ago the run last said what its state is. Healthy: seconds. Longer: Temporal is down, or no orchestrator "
    "worker is there.",
    Query(f"time() - {by('max', RUN(c.STATUS_TIMESTAMP), 'run')}", "ago"),
    steps=(30.0, 120.0),
    width=6,
)
FAULTS_NUMBER = number(
    "Faults of this attempt",
    COUNT,
    "Failed executions of activities since the workers started. Healthy: 0, or few: each is tried again.",
    Query(f"sum({RUN(c.ACTIVITY_FAULTS)})", "faults"),
    steps=(1.0, 50.0),
    width=6,
)
PROCESSES = graph(
    "Processes that answer",
    PLAIN,
    "1 while Prometheus can read the process's metrics. Healthy: 1 for every role. 0: the process is dead or hangs.",
    Query(f"min by (job, role) (up{{{RUN.fixed}}})", "{{role}} ({{job}})"),
)
PULSE = graph(
    "Age of the workers' pulse",
    "s",
    "Time since the process's event loop last ran. Healthy: about a second. Growing: the worker hangs and is about to "
    "be replaced.",
    Query(f"time() - {by('max', RUN(c.PULSE), 'role')}", "{{role}}"),
)
KINDS = graph(
    "Faults by kind",
    PER_SECOND,
    "What a person has to look at. store: S3. engine_*: vLLM. trainer_*: DeepSpeed. conflict, fenced: two writers. "
    "bad_data, bound_exceeded: stop and audit. Healthy: 0.",
    Query(by("sum", rate(RUN(c.ACTIVITY_FAULTS)), "kind"), "{{kind}}"),
    stacked=True,
)
ACTIVITIES = graph(
    "Faults by activity",
    PER_SECOND,
    "Which part of a step fails. Healthy: 0.",
    Query(by("sum", rate(RUN(c.ACTIVITY_FAULTS)), "activity"), "{{activity}}"),
    stacked=True,
)
RETRIES = graph(
    "Executions that were not the first",
    PER_SECOND,
    "Work done again. Healthy: 0. Steady without faults: workers are killed in mid-work, out of memory for example.",
    Query(by("sum", rate(RUN(c.ACTIVITY_RETRIES)), "activity"), "{{activity}}"),
)
RUNNING = graph(
    "Activities at work",
    COUNT,
    "Healthy: rollout_group near the number of groups in flight, train_step 1 most of the time.",
    Query(by("sum", RUN(c.ACTIVITIES_RUNNING), "activity"), "{{activity}}"),
)
DURATIONS = graph(
    "Seconds an activity",
    "s",
    "p95 of all executions, failed ones too. Healthy: steady.",
    Query(quantile(0.95, c.ACTIVITY_SECONDS, "activity"), "{{activity}}"),
)
WATCH = graph(
    "Looks that failed",
    PER_SECOND,
    "Of the exporters themselves: at the run, the records, the trainer, the engines. Healthy: 0; otherwise numbers on "
    "these pages are old.",
    Query(by("sum", rate(RUN(c.WATCH_ERRORS)), "source"), "{{source}}"),
)
LOST = graph(
    "Groups that were lost",
    PER_SECOND,
    "Groups that were generated, or begun, for nothing. Healthy: 0. dead-lettered: failed every attempt, their errors "
    "are in the run's dead letters.",
    Query(by("sum", rate(RUN(c.GROUPS_ENDED, state="~discarded|expired|dead-lettered")), "state"), "{{state}}"),
)

BOARD = Board(
    "roadstead-faults",
    "Roadstead: faults",
    "What failed, who does not answer, and what was tried again.",
    (
        ("Who answers", (SILENT, FAULTS_NUMBER, trainer.RESTARTS, trainer.SKIPPED, PROCESSES, PULSE, engines.UP)),
        ("What fails", (KINDS, ACTIVITIES, RETRIES, LOST, WATCH)),
        ("Work", (RUNNING, DURATIONS)),
    ),
)
