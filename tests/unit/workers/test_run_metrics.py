"""The run's status becomes metrics: what is the case now, and counters that grow by what was seen and nothing else."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from roadstead.metrics.registry import Metrics
from roadstead.workers import run_metrics
from roadstead.workers.run_metrics import RunNumbers
from roadstead.workflows.messages import BufferView, RunStatus
from tests.support import tiny


def status(**changes: Any) -> RunStatus:
    values: dict[str, Any] = {
        "run_id": "r",
        "attempt": 1,
        "phase": "running",
        "version": 3,
        "target_steps": 10,
        "training": None,
        "in_flight": 5,
        "waiting": 3,
        "admitted": 30,
        "trained": 12,
        "filtered": 2,
        "discarded": 1,
        "expired": 0,
        "dead_lettered": 1,
        "max_staleness": 2,
        "window": (
            BufferView(buffer=3, state="stuck", slots="OOOR"),
            BufferView(buffer=4, state="pending", slots="..RR"),
            BufferView(buffer=5, state="pending", slots="..RR"),
        ),
        "recent": (),
        "admissions": ((1, 4), (2, 4), (3, 1)),
        "empty_groups": 2,
    }
    return RunStatus(**{**values, **changes})


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("orchestrator")


@pytest.fixture
def numbers(metrics: Metrics, tmp_path: Path) -> RunNumbers:
    return RunNumbers(tiny.config(tmp_path, "r"), metrics)


def value(metrics: Metrics, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(metrics.text()):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    raise KeyError((name, labels))


def test_what_the_run_is_doing_now(metrics: Metrics, numbers: RunNumbers) -> None:
    numbers.look(status(), 0.0)
    assert value(metrics, "roadstead_run_phase", phase="running") == 1
    assert value(metrics, "roadstead_run_phase", phase="failed") == 0
    assert value(metrics, "roadstead_policy_version") == 3 and value(metrics, "roadstead_target_steps") == 10
    assert value(metrics, "roadstead_queue_groups", queue="in") == 5
    assert value(metrics, "roadstead_queue_groups", queue="out") == 3
    slots = {
        state: value(metrics, "roadstead_window_slots", state=state) for state in ("empty", "reserved", "occupied")
    }
    assert slots == {"empty": 4, "reserved": 5, "occupied": 3}
    buffers = ("pending", "stuck", "ready", "training")
    assert [value(metrics, "roadstead_window_buffers", state=state) for state in buffers] == [2, 1, 0, 0]
    assert value(metrics, "roadstead_empty_groups") == 2
    numbers.look(status(phase="failed"), 1.0)
    assert value(metrics, "roadstead_run_phase", phase="running") == 0
    assert value(metrics, "roadstead_run_phase", phase="failed") == 1


def test_admissions_stand_beside_the_bound(metrics: Metrics, numbers: RunNumbers) -> None:
    numbers.look(status(training=2), 0.0)
    assert value(metrics, "roadstead_admission_bound_groups") == (2 + 1) * 4
    assert value(metrics, "roadstead_staleness_bound_versions") == 2
    assert value(metrics, "roadstead_window_groups") == 5 + 3 + 4, "in flight, waiting, in training"
    assert value(metrics, "roadstead_step_admissions_groups", attempt="1") == 4, "of version 2: 3 is not over"
    assert value(metrics, "roadstead_window_buffers", state="training") == 1


COUNTERS = {
    "roadstead_admitted_groups_total": {},
    "roadstead_ended_groups_total": {"state": "trained"},
}


def admitted_and_trained(metrics: Metrics) -> tuple[float, float]:
    admitted, trained = (value(metrics, name, **labels) for name, labels in COUNTERS.items())
    return admitted, trained


def test_a_run_that_is_watched_from_its_start_is_counted_whole(metrics: Metrics, numbers: RunNumbers) -> None:
    numbers.absent()
    assert admitted_and_trained(metrics) == (0, 0)
    numbers.look(status(), 0.0)
    assert admitted_and_trained(metrics) == (30, 12)
    assert value(metrics, "roadstead_ended_groups_total", state="dead-lettered") == 1
    numbers.look(status(admitted=34, trained=16, empty_batches=1), 1.0)
    assert admitted_and_trained(metrics) == (34, 16)
    assert value(metrics, "roadstead_empty_batches_total") == 1


def test_a_process_that_begins_in_the_middle_adds_nothing_for_what_was_before(
    metrics: Metrics, numbers: RunNumbers
) -> None:
    """Its counters begin at 0: 30 at once would be an increase of 30 groups that nobody admitted now."""
    numbers.look(status(), 0.0)
    assert admitted_and_trained(metrics) == (0, 0)
    numbers.look(status(admitted=34, trained=16), 1.0)
    assert admitted_and_trained(metrics) == (4, 4)


def test_a_resume_counts_what_it_admits_and_not_what_it_restores(metrics: Metrics, numbers: RunNumbers) -> None:
    """The new attempt's counts come from S3: 100 admitted before, 12 now in flight."""
    numbers.absent()
    numbers.look(status(attempt=2, admitted=112, trained=88, in_flight=12), 0.0)
    assert admitted_and_trained(metrics) == (12, 0)
    numbers.look(status(attempt=2, admitted=116, trained=92), 1.0)
    assert admitted_and_trained(metrics) == (16, 4)


def test_a_resume_under_a_running_worker_never_lowers_a_counter(metrics: Metrics, numbers: RunNumbers) -> None:
    numbers.absent()
    numbers.look(status(admitted=30, trained=12), 0.0)
    numbers.look(status(attempt=2, admitted=26, trained=12, in_flight=6, filtered=0), 1.0)
    assert admitted_and_trained(metrics) == (36, 12)
    assert value(metrics, "roadstead_ended_groups_total", state="filtered") == 2


def test_stuck_parked_and_idle_time_is_what_passed_in_that_state(
    metrics: Metrics, numbers: RunNumbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = (BufferView(buffer=4, state="ready", slots="OOOO"),)
    numbers.look(status(), 0.0)
    since = int(time.time() * 1e6)
    monkeypatch.setattr(time, "time", lambda: since / 1e6 + 0.4)
    numbers.look(status(stuck_since=since), 1.0)
    assert value(metrics, "roadstead_stuck_now_seconds") == pytest.approx(0.4, abs=1e-3)
    monkeypatch.setattr(time, "time", lambda: since / 1e6 + 1.4)
    numbers.look(status(stuck_since=since), 1.0)
    numbers.look(status(), 1.0)
    assert value(metrics, "roadstead_stuck_seconds_total") == pytest.approx(1.4, abs=1e-3)
    assert value(metrics, "roadstead_stuck_now_seconds") == 0
    numbers.look(status(window=ready), 1.0)
    assert value(metrics, "roadstead_parked_seconds_total") == 0, "the trainer is free: it is taken at once"
    numbers.look(status(window=ready, training=3, in_flight=0), 2.0)
    assert value(metrics, "roadstead_parked_seconds_total") == 2
    assert value(metrics, "roadstead_generation_idle_seconds_total") == 2
    numbers.look(status(phase="paused", in_flight=0), 5.0)
    assert value(metrics, "roadstead_generation_idle_seconds_total") == 2, "a paused run is to be idle"


class Handle:
    """A run in Temporal, as it is on one look after the other: not there, there, closed, or out of reach."""

    def __init__(self, *looks: RunStatus | str) -> None:
        self._looks, self.queries = list(looks), 0
        self.done = asyncio.Event()

    def get_workflow_handle(self, run_id: str) -> Handle:
        return self

    async def describe(self, **_: object) -> object:
        if not self._looks:
            self.done.set()
            await asyncio.sleep(3600)
        now = self._looks.pop(0)
        if now == "absent":
            raise RPCError("no such workflow", RPCStatusCode.NOT_FOUND, b"")
        if now == "unreachable":
            raise RPCError("Temporal restarts", RPCStatusCode.UNAVAILABLE, b"")
        if isinstance(now, RunStatus):
            self._status = now
        running = isinstance(now, RunStatus)
        state = WorkflowExecutionStatus.RUNNING if running else WorkflowExecutionStatus.COMPLETED
        return SimpleNamespace(status=state)

    async def query(self, *_: object, **__: object) -> RunStatus:
        self.queries += 1
        return self._status


async def watched(monkeypatch: pytest.MonkeyPatch, folder: Path, *looks: RunStatus | str) -> tuple[Metrics, Handle]:
    monkeypatch.setattr(run_metrics, "_LOOK_S", 0.001)
    handle, metrics = Handle(*looks), Metrics("orchestrator")
    numbers = RunNumbers(tiny.config(folder, "r"), metrics)
    task = asyncio.create_task(run_metrics._watch("r", cast(Client, handle), numbers, metrics))
    await asyncio.wait_for(handle.done.wait(), 20)
    task.cancel()
    return metrics, handle


async def test_a_run_is_followed_from_before_its_start_to_after_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks = ["absent", "absent", status(admitted=12, trained=0), status(admitted=30), *["closed"] * 5]
    metrics, handle = await watched(monkeypatch, tmp_path, *looks)
    assert admitted_and_trained(metrics) == (30, 12)
    assert handle.queries == 3, "once more when it had ended, and not again: each query replays a closed workflow"


async def test_the_closed_workflow_of_an_earlier_attempt_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks = ["closed", "closed", status(attempt=2, admitted=112, in_flight=12)]
    metrics, handle = await watched(monkeypatch, tmp_path, *looks)
    assert handle.queries == 1
    assert admitted_and_trained(metrics) == (12, 0)


async def test_what_can_not_be_read_is_counted_and_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    looks = ["absent", status(admitted=12, trained=0), "unreachable", "unreachable", status(admitted=30)]
    metrics, _ = await watched(monkeypatch, tmp_path, *looks)
    assert value(metrics, "roadstead_watch_errors_total", source="run") == 2
    assert admitted_and_trained(metrics) == (30, 12)


def test_without_metrics_nobody_watches(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, "r", metrics={"enabled": False})
    nothing: Any = None
    assert run_metrics.watches(config, nothing, nothing, nothing, Metrics("orchestrator")) == []
