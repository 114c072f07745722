"""The run's own numbers, read from beside it: a companion of the orchestrator worker.

Owns: the metrics that only the run knows, set from its `status` query. Never touches: the run.
Invariant: a counter here grows by what happened while this process watched. A process that begins in the middle of a
run, or a resume whose counts begin again, adds nothing for what was before: Prometheus would take it for a burst.
A crash leaves: nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from datetime import timedelta

import structlog
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

from roadstead.config import RunConfig
from roadstead.metrics import catalogue
from roadstead.metrics.registry import Metrics
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.workers.evaluation_metrics import EvaluationWatch
from roadstead.workers.step_metrics import StepNumbers, StepWatch
from roadstead.workflows.messages import RunStatus

_LOOK_S = 1.0
"""Between two looks. A query costs the worker some milliseconds and writes no history."""
_ANSWER = timedelta(seconds=5)
_TRIES = 2
"""Of a request to the store: the next look comes soon, and those who need the store try for long."""
_SLOTS = {"O": "occupied", "R": "reserved", ".": "empty"}

log = structlog.get_logger(__name__)


class RunNumbers:
    """From one status after the other to values of metrics. Pure but for the clock's reading."""

    def __init__(self, config: RunConfig, metrics: Metrics) -> None:
        self._metrics, self._batch = metrics, config.staleness.groups_per_batch
        self._attempt: int | None = None
        self._watched_from_the_start = False
        self._counts: dict[str, int] = {}
        bound = config.staleness.max_staleness
        metrics.set(catalogue.STALENESS_BOUND, bound)
        metrics.set(catalogue.ADMISSION_BOUND, (bound + 1) * config.slots_per_buffer)

    @property
    def attempt(self) -> int | None:
        """The last one seen."""
        return self._attempt

    def absent(self) -> None:
        """The run is not there (yet): what it does from now on is seen from its start."""
        self._watched_from_the_start = True

    def look(self, status: RunStatus, elapsed_s: float) -> None:
        """elapsed_s: since the last look; the run is taken to have been as it is now for so long."""
        metrics = self._metrics
        metrics.set(catalogue.STATUS_TIMESTAMP, time.time())
        for phase in catalogue.RUN_PHASE.labels["phase"]:
            metrics.set(catalogue.RUN_PHASE, status.phase == phase, phase=phase)
        metrics.set(catalogue.ATTEMPT, status.attempt)
        metrics.set(catalogue.POLICY_VERSION, status.version)
        metrics.set(catalogue.TARGET_STEPS, status.target_steps)
        self._window(status)
        self._time(status, elapsed_s)
        self._count(status)
        metrics.set(catalogue.EMPTY_GROUPS, status.empty_groups)
        # Only of a version that is over is the number whole.
        if (admitted := dict(status.admissions).get(status.version - 1)) is not None:
            metrics.set(catalogue.STEP_ADMISSIONS, admitted, attempt=str(status.attempt))

    def _window(self, status: RunStatus) -> None:
        metrics = self._metrics
        training = status.training is not None
        metrics.set(catalogue.QUEUE, status.in_flight, queue="in")
        metrics.set(catalogue.QUEUE, status.waiting, queue="out")
        metrics.set(catalogue.WINDOW_GROUPS, status.in_flight + status.waiting + training * self._batch)
        slots = Counter(_SLOTS[letter] for buffer in status.window for letter in buffer.slots)
        for state in catalogue.WINDOW_SLOTS.labels["state"]:
            metrics.set(catalogue.WINDOW_SLOTS, slots[state], state=state)
        buffers = Counter({"training": int(training)}) + Counter(buffer.state for buffer in status.window)
        for state in catalogue.WINDOW_BUFFERS.labels["state"]:
            metrics.set(catalogue.WINDOW_BUFFERS, buffers[state], state=state)

    def _time(self, status: RunStatus, elapsed_s: float) -> None:
        metrics = self._metrics
        stuck_s = 0.0 if status.stuck_since is None else max(0.0, time.time() - status.stuck_since / 1e6)
        metrics.set(catalogue.STUCK_NOW, stuck_s)
        metrics.add(catalogue.STUCK, min(elapsed_s, stuck_s))
        if status.training is not None and any(buffer.state == "ready" for buffer in status.window):
            metrics.add(catalogue.PARKED, elapsed_s)
        if status.phase == "running" and status.in_flight == 0:
            metrics.add(catalogue.GENERATION_IDLE, elapsed_s)

    def _count(self, status: RunStatus) -> None:
        counts = {
            "admitted": status.admitted,
            "trained": status.trained,
            "filtered": status.filtered,
            "discarded": status.discarded,
            "expired": status.expired,
            "dead-lettered": status.dead_lettered,
            "empty batches": status.empty_batches,
        }
        if status.attempt != self._attempt:
            self._counts = self._before(status, counts)
            self._attempt, self._watched_from_the_start = status.attempt, True
        grown = {name: max(0, count - self._counts[name]) for name, count in counts.items()}
        self._counts = counts
        self._metrics.add(catalogue.GROUPS_ADMITTED, grown["admitted"])
        self._metrics.add(catalogue.EMPTY_BATCHES, grown["empty batches"])
        for state in catalogue.GROUPS_ENDED.labels["state"]:
            self._metrics.add(catalogue.GROUPS_ENDED, grown[state], state=state)

    def _before(self, status: RunStatus, counts: dict[str, int]) -> dict[str, int]:
        """The run's counts before we watched."""
        if not self._watched_from_the_start:
            return counts
        if status.attempt == 1:
            return dict.fromkeys(counts, 0)
        # A resume counts on from S3. Whatever is in flight was admitted since: none of it outlives an attempt.
        return counts | {"admitted": counts["admitted"] - status.in_flight}


def watches(
    config: RunConfig, client: Client, store: ObjectStore, keys: RunKeys, metrics: Metrics
) -> Sequence[Awaitable[None]]:
    """What runs beside the orchestrator worker: nothing when nobody asks for metrics."""
    if not config.metrics.enabled:
        return []
    run = RunNumbers(config, metrics)
    reader = ObjectStore(dataclasses.replace(store.address, attempts=_TRIES))
    steps = StepWatch(reader, keys, StepNumbers(config, metrics), lambda: run.attempt)
    beside = [EvaluationWatch(reader, keys, metrics).run()] if config.evaluation is not None else []
    return [_watch(config.name, client, run, metrics), steps.run(metrics), *beside]


async def _watch(run_id: str, client: Client, numbers: RunNumbers, metrics: Metrics) -> None:
    """Look at the run until cancelled. Raises nothing: a look that fails is counted, and there is another."""
    handle, looked, following = client.get_workflow_handle(run_id), time.monotonic(), False
    while True:
        try:
            running = await _running(handle)
            if running or following:  # once more when it has ended: for the last numbers
                status = await handle.query("status", result_type=RunStatus, rpc_timeout=_ANSWER)
                now = time.monotonic()
                numbers.look(status, now - looked if following else 0.0)
                looked = now
            else:
                numbers.absent()
            following = running
        except Exception as error:  # whatever it is, the run must not notice
            looked = time.monotonic()  # the time that nobody saw is in no state
            metrics.add(catalogue.WATCH_ERRORS, source="run")
            log.warning("metrics.run_not_read", run=run_id, error=f"{type(error).__name__}: {error}")
        await asyncio.sleep(_LOOK_S)


async def _running(handle: WorkflowHandle[object, object]) -> bool:
    """Whether the workflow runs. Asked first: a query of a closed one replays its history every time."""
    try:
        description = await handle.describe(rpc_timeout=_ANSWER)
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            return False
        raise
    return description.status == WorkflowExecutionStatus.RUNNING
