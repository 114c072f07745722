"""The dashboard of the ledger: queues, admissions, ages, and where time is lost to the bound."""

from __future__ import annotations

from roadstead.dashboards.grafana.board import Board
from roadstead.dashboards.grafana.panels import GROUPS, PER_SECOND, PLAIN, SHARE, VERSIONS, Query, graph, number
from roadstead.dashboards.grafana.queries import RUN, by, mean, rate
from roadstead.metrics import catalogue as c

BOUND = Query(by("max", RUN(c.STALENESS_BOUND), "run"), "bound S")

QUEUE = graph(
    "Dispatcher queues",
    GROUPS,
    "Groups in flight (in) and finished groups that no step has taken (out). Healthy: out is not empty and stable. "
    "Empty: generation is the bottleneck. Always a batch or more: the trainer is.",
    Query(by("max", RUN(c.QUEUE), "queue"), "{{queue}}"),
)
ADMISSIONS = graph(
    "Admissions per step",
    GROUPS,
    "Groups admitted between two batches. Healthy: near B in a steady run, (S + 1) x B in the first step. Zero before "
    "the last S + 1 steps: the gate is closed. Above the bound: the counters are wrong.",
    Query(by("max", RUN(c.STEP_ADMISSIONS), "attempt"), "admitted (attempt {{attempt}})"),
    Query(by("max", RUN(c.ADMISSION_BOUND), "run"), "bound (S + 1) x B"),
)
AGES = graph(
    "Age of the trained batch",
    VERSIONS,
    "Step minus the version of a trajectory's oldest trained token, exact. Healthy: at or below S, always. A large gap "
    "between maximum and mean: completion times spread widely, a few slow groups hold their batch up.",
    Query(by("max", RUN(c.BATCH_AGE_MAX), "attempt"), "max (attempt {{attempt}})"),
    Query(by("max", RUN(c.BATCH_AGE_P99), "attempt"), "p99 (attempt {{attempt}})"),
    Query(by("max", RUN(c.BATCH_AGE_MEAN), "attempt"), "mean (attempt {{attempt}})"),
    BOUND,
)
AGE_SHARES = graph(
    "Trained trajectories of at most this age",
    SHARE,
    "Cumulative: the line of age 1 is the share of trajectories of age 0 or 1. Healthy: the line of S is 1. All lines "
    "but that one near 0: everything is as old as the bound allows.",
    Query(
        f"{by('sum', rate(RUN(c.TRAINED_AGE, '_bucket')), 'le')} / ignoring(le) group_left() "
        f"(sum({rate(RUN(c.TRAINED_AGE, '_count'))}) > 0)",
        "age {{le}}",
    ),
)
OVER_BOUND = number(
    "Trajectories over the bound",
    PLAIN,
    "Trained trajectories older than S. Healthy: 0, always. Anything else is a bug in Roadstead: stop and audit.",
    Query(by("sum", RUN(c.OVER_BOUND), "run"), "over S"),
    steps=(1.0, 1.0),  # red at once
    width=6,
)
SYSTEM = graph(
    "Groups in the system",
    GROUPS,
    "In flight, finished and waiting, or being trained. Healthy: near the bound (S + 1) x B, below it only while a "
    "run starts, drains or ends.",
    Query(by("max", RUN(c.WINDOW_GROUPS), "run"), "groups"),
    Query(by("max", RUN(c.ADMISSION_BOUND), "run"), "bound"),
)
SLOTS = graph(
    "Slots of the open buffers",
    "suffix: slots",
    "Healthy: few empty ones. Reserved: generation is at work. Occupied: data waits for its batch to fill.",
    Query(by("max", RUN(c.WINDOW_SLOTS), "state"), "{{state}}"),
    stacked=True,
)
BUFFERS = graph(
    "Open buffers",
    "suffix: buffers",
    "Healthy: one in training, the others pending or ready. Stuck for long: every slot is taken and a slow group is "
    "awaited; see rollout.stuck_timeout_s.",
    Query(by("max", RUN(c.WINDOW_BUFFERS), "state"), "{{state}}"),
    stacked=True,
)
STUCK_NOW = number(
    "Stuck now",
    "s",
    "How long an idle trainer has waited for a batch whose every slot is taken. Healthy: 0, or seconds.",
    Query(by("max", RUN(c.STUCK_NOW), "run"), "stuck"),
    steps=(60.0, 300.0),
    width=6,
)
WAITING = graph(
    "Time lost to waiting",
    SHARE,
    "Share of time. parked: a full batch waits for the trainer. stuck: an idle trainer waits for a batch that nothing "
    "can be admitted to. gate closed: the bound lets nothing be generated. Healthy: small and steady, all three.",
    Query(by("sum", rate(RUN(c.PARKED)), "run"), "parked"),
    Query(by("sum", rate(RUN(c.STUCK)), "run"), "stuck"),
    Query(by("sum", rate(RUN(c.GENERATION_IDLE)), "run"), "gate closed"),
)
ADMITTED = graph(
    "Groups admitted and ended",
    PER_SECOND,
    "Healthy: what is admitted is trained, at the same pace. Expired, discarded and dead-lettered groups are work that "
    "was lost; filtered ones are what filters keep out.",
    Query(by("sum", rate(RUN(c.GROUPS_ADMITTED)), "run"), "admitted"),
    Query(by("sum", rate(RUN(c.GROUPS_ENDED)), "state"), "{{state}}"),
)
LEDGER_SECONDS = graph(
    "Ledger calls",
    "s",
    "Mean time of a reservation and of an occupation, from worker to workflow and back. Healthy: tens of milliseconds. "
    "Growing: Temporal is slow or the run's history is long.",
    Query(mean(c.ACTIVITY_SECONDS, "activity", role="ledger", outcome="completed"), "{{activity}}"),
)

BOARD = Board(
    "roadstead-staleness",
    "Roadstead: staleness and ledger",
    "How old the data are that a run trains on, and what holds them up.",
    (
        ("The bound", (AGES, AGE_SHARES, OVER_BOUND, STUCK_NOW)),
        ("The window", (QUEUE, ADMISSIONS, SYSTEM, SLOTS, BUFFERS, WAITING)),
        ("Flow", (ADMITTED, LEDGER_SECONDS)),
    ),
)
