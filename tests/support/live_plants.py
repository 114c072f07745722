"""Faults planted into metrics that a real Prometheus scrapes: two runs that exist in their metrics only.

Each goes through the project's own registry and exporter, with the labels of a real process. Two runs, since a queue
can't be empty and full at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from roadstead.infra.ports import LOOPBACK, free_port
from roadstead.metrics import catalogue as c
from roadstead.metrics.registry import Metrics
from roadstead.metrics.server import OWN, served, write_target

_EVERY_S = 0.25
S, B, ENGINE = 2, 8, "vllm-1"


class Everything:
    """The metrics of all roles of one run."""

    def __init__(self) -> None:
        self.o, self.r, self.t = Metrics("orchestrator"), Metrics("rollout"), Metrics("train")
        self.version = 0

    def healthy(self) -> None:
        """A quarter of a second of a run that is well."""
        o, r, t, now = self.o, self.r, self.t, time.time()
        self.version += 1
        for phase in c.RUN_PHASE.labels["phase"]:
            o.set(c.RUN_PHASE, phase == "running", phase=phase)
        for metric, value in (
            *((c.STATUS_TIMESTAMP, now), (c.POLICY_VERSION, self.version), (c.TARGET_STEPS, 1e6)),
            *((c.STALENESS_BOUND, S), (c.ADMISSION_BOUND, (S + 1) * B), (c.EMPTY_GROUPS, 1), (c.STUCK_NOW, 0)),
        ):
            o.set(metric, value)
        o.set(c.QUEUE, (4, 10)[self.version // 8 % 2], queue="out")
        for metric, value in (
            *((c.STEP_ADMISSIONS, B), (c.BATCH_AGE_MAX, 2), (c.BATCH_AGE_MEAN, 1.2), (c.BATCH_TRAINABLE, 0.7)),
        ):
            o.set(metric, value, attempt="1")
        for metrics in (o, r, t):
            metrics.set(c.PULSE, now)
        o.begin(c.ACTIVITY_FAULTS, activity="persist_batch")
        r.set(c.ENGINE_UP, 1, engine=ENGINE)
        r.set(c.ENGINE_VERSION, self.version, engine=ENGINE)
        r.set(c.RELOAD_TIMESTAMP, now, engine=ENGINE)
        r.observe(c.RELOAD_SECONDS, 0.01, engine=ENGINE)
        t.set(c.TRAINER_UP, 1)


Fault = Callable[[Everything], None]

FIRST: dict[str, Fault] = {
    "RoadsteadGenerationIsTheBottleneck": lambda run: run.o.set(c.QUEUE, 0, queue="out"),
    "RoadsteadNoAdmissions": lambda run: run.o.set(c.STEP_ADMISSIONS, 0, attempt="1"),
    "RoadsteadAgesSpread": lambda run: run.o.set(c.BATCH_AGE_MEAN, 0.2, attempt="1"),
    "RoadsteadWeightReloadSlow": lambda run: run.r.observe(c.RELOAD_SECONDS, 1e4, engine=ENGINE),
    "RoadsteadFewTrainable": lambda run: run.o.set(c.BATCH_TRAINABLE, 0.01, attempt="1"),
    "RoadsteadGateClosed": lambda run: run.o.add(c.GENERATION_IDLE, 2 * _EVERY_S),
    "RoadsteadEmptyBatches": lambda run: run.o.add(c.EMPTY_BATCHES),
    "RoadsteadTrainerIdle": lambda run: run.t.add(c.TRAINER_PHASE, _EVERY_S, phase="idle"),
    "RoadsteadStoreErrors": lambda run: run.o.add(c.ACTIVITY_FAULTS, activity="persist_batch", kind="store"),
    "RoadsteadWorkerHangs": lambda run: run.r.set(c.PULSE, time.time() - 100),
    "RoadsteadEngineDown": lambda run: run.r.set(c.ENGINE_UP, 0, engine=ENGINE),
    "RoadsteadStuck": lambda run: run.o.set(c.STUCK_NOW, 301),
    "RoadsteadStepNotApplied": lambda run: run.o.add(c.STEPS_SKIPPED),
}
SECOND: dict[str, Fault] = {
    "RoadsteadTrainerIsTheBottleneck": lambda run: run.o.set(c.QUEUE, 16, queue="out"),
    "RoadsteadAdmissionSpike": lambda run: run.o.set(c.STEP_ADMISSIONS, 99, attempt="1"),
    "RoadsteadBoundReached": lambda run: run.o.set(c.BATCH_AGE_MEAN, 1.99, attempt="1"),
    "RoadsteadBoundExceeded": lambda run: run.o.add(c.OVER_BOUND),
    "RoadsteadParkedGrowing": lambda run: run.o.add(c.PARKED, _EVERY_S),
    "RoadsteadWatcherStalled": lambda run: (
        run.r.set(c.ENGINE_VERSION, 0, engine=ENGINE),
        run.r.set(c.RELOAD_TIMESTAMP, time.time() - 301, engine=ENGINE),
    )[0],
    "RoadsteadRunSilent": lambda run: run.o.set(c.STATUS_TIMESTAMP, time.time() - 121),
    "RoadsteadTrainerDown": lambda run: run.t.set(c.TRAINER_UP, 0),
    "RoadsteadGroupsLost": lambda run: run.o.add(c.GROUPS_ENDED, state="dead-lettered"),
    "RoadsteadTwoWriters": lambda run: run.o.add(c.ACTIVITY_FAULTS, activity="persist_batch", kind="conflict"),
}
DOWN = "RoadsteadProcessDown"
PLANTED = {**dict.fromkeys(FIRST, "planted-1"), **dict.fromkeys(SECOND, "planted-2"), DOWN: "planted-2"}
"""Alert to the run that its fault is planted in."""


class Plants:
    """`faulty` while it is True the faults are there; set it to False and the runs are well again."""

    def __init__(self, folder: Path) -> None:
        self.faulty = True
        self._dead = folder / "planted-2" / "metrics" / "ledger.json"
        self._end = threading.Event()
        self._runs = {"planted-1": (Everything(), FIRST), "planted-2": (Everything(), SECOND)}

    def play(self) -> None:
        port = free_port()
        while not self._end.wait(_EVERY_S):
            for run, faults in self._runs.values():
                run.healthy()
                if self.faulty:
                    for fault in faults.values():
                        fault(run)
            if self.faulty and not self._dead.exists():
                write_target(self._dead, f"{LOOPBACK}:{port}", OWN, {"run": "planted-2", "role": "ledger"})
            elif not self.faulty:
                self._dead.unlink(missing_ok=True)


@contextlib.contextmanager
def planted(folder: Path) -> Iterator[Plants]:
    """Served for the length of the block; target files lie under `folder` as under a data directory's runs."""
    plants = Plants(folder)
    with contextlib.ExitStack() as stack:
        for name, (run, _) in plants._runs.items():
            for metrics in (run.o, run.r, run.t):
                labels = {"run": name, "role": metrics.role}
                assert stack.enter_context(served(metrics.registry, folder / name, labels)) is not None
        player = threading.Thread(target=plants.play, daemon=True)
        player.start()
        try:
            yield plants
        finally:
            plants._end.set()
            player.join(timeout=10)
