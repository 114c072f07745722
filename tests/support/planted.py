"""A run as Prometheus would have scraped it: healthy, with a fault, and healthy again; for `promtool test`.

Times are minutes. Each series has a value a minute. A plant changes some series while the fault lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from roadstead.metrics import catalogue as c
from roadstead.metrics.catalogue import Metric

BEGINS, ENDS, OVER = 30, 75, 120
"""The fault lasts longer than any window and duration together; then there is time to clear."""
RUN, ENGINE = "planted", "vllm-1"
S, B, STEP_S = 2, 8, 60.0
UP = Metric("up", "gauge", "", "rollout", "Prometheus' own: whether the target could be scraped.")

Level = Callable[[int], float]
"""Value at a minute."""


def flat(value: float) -> Level:
    return lambda minute: value


def growing(a_minute: int) -> Level:
    return lambda minute: a_minute * minute


def during(fault: Level, otherwise: Level) -> Level:
    """A gauge that is something else while the fault lasts."""
    return lambda minute: fault(minute) if BEGINS <= minute < ENDS else otherwise(minute)


def grows_more(a_minute: int, otherwise: float = 0.0) -> Level:
    """A counter that grows at another pace while the fault lasts."""

    def at(minute: int) -> float:
        inside = min(max(minute - BEGINS, 0), ENDS - BEGINS)
        return otherwise * (minute - inside) + a_minute * inside

    return at


def of(metric: Metric, suffix: str = "", /, **labels: str) -> str:
    """A series of the run's."""
    place = {"run": RUN, "job": "roadstead", "instance": "127.0.0.1:1", "role": metric.role}
    inside = ",".join(f'{label}="{value}"' for label, value in sorted({**place, **labels}.items()))
    return f"{metric.name}{suffix}{{{inside}}}"


_A = {"attempt": "1"}
_E = {"engine": ENGINE}
_AGE: Level = flat(1.2)

HEALTHY: Mapping[str, Level] = {
    of(c.RUN_PHASE, phase="running"): flat(1),
    of(c.RUN_PHASE, phase="paused"): flat(0),
    of(c.STATUS_TIMESTAMP): lambda minute: minute * 60,
    of(c.POLICY_VERSION): lambda minute: minute * 60 // STEP_S,
    of(c.TARGET_STEPS): flat(10_000),
    of(c.STALENESS_BOUND): flat(S),
    of(c.ADMISSION_BOUND): flat((S + 1) * B),
    # Between a trainer that starves and one that is always behind: a batch waits at some moments.
    of(c.QUEUE, queue="out"): lambda minute: (4, 10)[minute % 2],
    of(c.QUEUE, queue="in"): flat(12),
    of(c.STEP_ADMISSIONS, **_A): flat(B),
    of(c.BATCH_AGE_MAX, **_A): flat(2),
    of(c.BATCH_AGE_MEAN, **_A): _AGE,
    of(c.OVER_BOUND): flat(0),
    of(c.BATCH_TRAINABLE, **_A): flat(0.7),
    of(c.EMPTY_BATCHES): flat(0),
    of(c.EMPTY_GROUPS): flat(1),
    of(c.STUCK_NOW): flat(0),
    of(c.PARKED): growing(6),
    of(c.GENERATION_IDLE): growing(3),
    of(c.STEPS_SKIPPED): flat(0),
    **{of(c.GROUPS_ENDED, state=state): flat(0) for state in ("expired", "dead-lettered")},
    of(c.GROUPS_ENDED, state="trained"): growing(B),
    of(c.WATCH_ERRORS, source="records"): flat(0),
    **{
        of(c.ACTIVITY_FAULTS, activity="persist_batch", kind=kind): flat(0)
        for kind in ("store", "conflict", "fenced", "other")
    },
    of(c.ENGINE_UP, **_E): flat(1),
    of(c.ENGINE_VERSION, **_E): lambda minute: minute * 60 // STEP_S,
    of(c.RELOAD_TIMESTAMP, **_E): lambda minute: minute * 60 // STEP_S * STEP_S,
    of(c.RELOAD_SECONDS, "_sum", **_E): growing(4),
    of(c.RELOAD_SECONDS, "_count", **_E): growing(1),
    of(c.TRAINER_UP): flat(1),
    of(c.TRAINER_PHASE, phase="idle"): growing(6),
    of(c.PULSE, role="rollout"): lambda minute: minute * 60,
    of(UP): flat(1),
}


@dataclass(frozen=True)
class Plant:
    """A fault: what it does to the series, and which alert it is for."""

    alert: str
    changes: Mapping[str, Level]
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of the alert, besides run and severity."""


def stopped_at_fault(metric_at: Level) -> Level:
    """A value that stands still while the fault lasts and is right again afterwards."""
    return lambda minute: metric_at(BEGINS) if BEGINS <= minute < ENDS else metric_at(minute)


PLANTS: tuple[Plant, ...] = (
    Plant(
        "RoadsteadGenerationIsTheBottleneck",
        {of(c.QUEUE, queue="out"): during(flat(0), HEALTHY[of(c.QUEUE, queue="out")])},
    ),
    Plant(
        "RoadsteadTrainerIsTheBottleneck",
        {of(c.QUEUE, queue="out"): during(flat(16), HEALTHY[of(c.QUEUE, queue="out")])},
    ),
    Plant("RoadsteadNoAdmissions", {of(c.STEP_ADMISSIONS, **_A): during(flat(0), flat(B))}),
    Plant("RoadsteadAdmissionSpike", {of(c.STEP_ADMISSIONS, **_A): during(flat(99), flat(B))}),
    Plant("RoadsteadAgesSpread", {of(c.BATCH_AGE_MEAN, **_A): during(flat(0.2), _AGE)}),
    Plant("RoadsteadWeightReloadSlow", {of(c.RELOAD_SECONDS, "_sum", **_E): grows_more(45, 4)}),
    Plant("RoadsteadFewTrainable", {of(c.BATCH_TRAINABLE, **_A): during(flat(0.01), flat(0.7))}),
    Plant("RoadsteadParkedGrowing", {of(c.PARKED): grows_more(50, 6)}),
    Plant(
        "RoadsteadWatcherStalled",
        {
            of(c.ENGINE_VERSION, **_E): stopped_at_fault(HEALTHY[of(c.ENGINE_VERSION, **_E)]),
            of(c.RELOAD_TIMESTAMP, **_E): stopped_at_fault(HEALTHY[of(c.RELOAD_TIMESTAMP, **_E)]),
        },
        {"engine": ENGINE},
    ),
    Plant("RoadsteadGateClosed", {of(c.GENERATION_IDLE): grows_more(60, 3)}),
    Plant("RoadsteadEmptyBatches", {of(c.EMPTY_BATCHES): grows_more(0.5)}),
    Plant("RoadsteadEmptyBatches", {of(c.EMPTY_GROUPS): during(flat(B), flat(0))}),
    Plant("RoadsteadBoundReached", {of(c.BATCH_AGE_MEAN, **_A): during(flat(1.97), _AGE)}),
    Plant("RoadsteadBoundExceeded", {of(c.OVER_BOUND): grows_more(1)}),
    Plant("RoadsteadTrainerIdle", {of(c.TRAINER_PHASE, phase="idle"): grows_more(45, 6)}),
    Plant("RoadsteadStoreErrors", {of(c.ACTIVITY_FAULTS, activity="persist_batch", kind="store"): grows_more(0.2)}),
    Plant("RoadsteadStoreErrors", {of(c.WATCH_ERRORS, source="records"): grows_more(0.2)}),
    Plant("RoadsteadProcessDown", {of(UP): during(flat(0), flat(1))}, {"role": "rollout"}),
    Plant(
        "RoadsteadWorkerHangs",
        {of(c.PULSE, role="rollout"): stopped_at_fault(lambda minute: minute * 60)},
        {"role": "rollout"},
    ),
    Plant("RoadsteadRunSilent", {of(c.STATUS_TIMESTAMP): stopped_at_fault(lambda minute: minute * 60)}),
    Plant("RoadsteadEngineDown", {of(c.ENGINE_UP, **_E): during(flat(0), flat(1))}, {"engine": ENGINE}),
    Plant("RoadsteadTrainerDown", {of(c.TRAINER_UP): during(flat(0), flat(1))}),
    Plant("RoadsteadStuck", {of(c.STUCK_NOW): during(lambda minute: (minute - BEGINS) * 60, flat(0))}),
    Plant("RoadsteadStepNotApplied", {of(c.STEPS_SKIPPED): grows_more(0.1)}),
    Plant("RoadsteadGroupsLost", {of(c.GROUPS_ENDED, state="expired"): grows_more(1)}, {"state": "expired"}),
    Plant(
        "RoadsteadTwoWriters",
        {of(c.ACTIVITY_FAULTS, activity="persist_batch", kind="fenced"): grows_more(1)},
        {"kind": "fenced"},
    ),
)


def input_series(changes: Mapping[str, Level]) -> list[dict[str, Any]]:
    """The `input_series` of a test, the healthy run with some series changed."""
    return [{"series": series, "values": _values(level)} for series, level in {**HEALTHY, **changes}.items()]


def _values(level: Level) -> str:
    return " ".join(f"{level(minute):g}" for minute in range(OVER + 1))
