"""Measures every activity of a worker, whatever it does.

Owns: durations, outcomes, retries and faults of executions, and what their results say of tokens and of a step's
phases. Never touches: what an activity gets, returns or raises.
Invariant: measuring changes nothing: an error in it is logged, and the activity goes on.
A crash leaves: nothing.

It is given to the client; the SDK hands it on to every worker of that client.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import structlog
import temporalio.client
import temporalio.worker
from temporalio import activity
from temporalio.exceptions import CancelledError
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Worker

from roadstead.metrics import catalogue
from roadstead.metrics.registry import Metrics
from roadstead.storage.references import StagedGroup
from roadstead.workers.faults import kind_of
from roadstead.workflows.messages import Placement, TrainedStep

log = structlog.get_logger(__name__)


class Measured(temporalio.client.Interceptor, temporalio.worker.Interceptor):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _Execution(next, self._metrics)


def begin(metrics: Metrics, worker: Worker) -> None:
    """Make the series of the worker's activities before the first of them runs."""
    for registered in worker.config().get("activities", ()):
        name = registered.__name__  # no activity of ours has another
        for metric in (catalogue.ACTIVITY_SECONDS, catalogue.ACTIVITY_RETRIES, catalogue.ACTIVITY_FAULTS):
            metrics.begin(metric, activity=name)


class _Execution(ActivityInboundInterceptor):
    def __init__(self, next: ActivityInboundInterceptor, metrics: Metrics) -> None:
        super().__init__(next)
        self._metrics = metrics

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        info, began = activity.info(), time.monotonic()
        name = info.activity_type
        with _quietly(name):
            self._metrics.shift(catalogue.ACTIVITIES_RUNNING, 1, activity=name)
            if info.attempt > 1:
                self._metrics.add(catalogue.ACTIVITY_RETRIES, activity=name)
        try:
            result = await super().execute_activity(input)
        except (asyncio.CancelledError, CancelledError):
            self._ended(name, began, "cancelled")
            raise
        except Exception as error:
            self._ended(name, began, "failed", error)
            raise
        self._ended(name, began, "completed")
        with _quietly(name):
            if (read := _RESULTS.get(name)) is not None:
                read(self._metrics, result, input.args)
        return result

    def _ended(self, name: str, began: float, outcome: str, error: Exception | None = None) -> None:
        with _quietly(name):
            seconds = time.monotonic() - began
            self._metrics.shift(catalogue.ACTIVITIES_RUNNING, -1, activity=name)
            self._metrics.observe(catalogue.ACTIVITY_SECONDS, seconds, activity=name, outcome=outcome)
            if error is not None:
                self._metrics.add(catalogue.ACTIVITY_FAULTS, activity=name, kind=kind_of(error))


def _generated(metrics: Metrics, group: StagedGroup, _: object) -> None:
    outcome = "filtered" if group.filtered is not None else "trainable" if group.trainable else "untrainable"
    metrics.add(catalogue.GROUPS_GENERATED, outcome=outcome)
    metrics.add(catalogue.TOKENS_GENERATED, group.tokens)
    metrics.add(catalogue.TRAJECTORIES_ABORTED, group.aborted_members)


def _placed(metrics: Metrics, placement: Placement, arguments: Any) -> None:
    (group,) = arguments
    if placement.outcome != "placed":
        metrics.add(catalogue.TOKENS_DISCARDED, group.tokens, reason=placement.outcome)


def _trained(metrics: Metrics, step: TrainedStep, _: object) -> None:
    known = catalogue.STEP_PHASE_SECONDS.labels["phase"]
    for phase, seconds in step.seconds.items():
        metrics.observe(catalogue.STEP_PHASE_SECONDS, seconds, phase=phase if phase in known else "other")


_RESULTS: dict[str, Callable[[Metrics, Any, Any], None]] = {
    "rollout_group": _generated,
    "occupy_slot": _placed,
    "train_step": _trained,
}
"""What is read from an activity's result and arguments, by its name."""


@contextlib.contextmanager
def _quietly(name: str) -> Iterator[None]:
    try:
        yield
    except Exception:  # whatever it is: a group's hours of generation are worth more than its count
        log.exception("metrics.not_measured", activity=name)
