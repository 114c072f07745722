"""The follower and its threads: in order, once, and never in the run's way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from roadstead.config import parse
from roadstead.trackers import follow
from roadstead.trackers.follow import Follower
from roadstead.workers import tracking
from tests.support.memory_store import MemoryStore
from tests.unit.trackers.records import KEYS, add_step, follow_once, run_store


class Broken(Exception):
    """Of a tracker's library."""


class Held:
    """A tracker's server: what arrived stays, whoever sent it."""

    def __init__(self) -> None:
        self.points: list[tuple[int, Mapping[str, float]]] = []
        self.opened, self.closed = 0, 0

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.points]


class FakeTracker:
    """`fails(n)`: what to raise at point n (from 0) of all that was tried, after it arrived if `arrives`."""

    def __init__(
        self, held: Held, fails: Callable[[int], Exception | None] = lambda n: None, *, arrives: bool = False
    ) -> None:
        self.held, self.fails, self.arrives = held, fails, arrives
        self.tried = 0

    def open(self, run: str, config: Mapping[str, Any]) -> None:
        assert run.startswith("r-") and config["name"] == "r"
        self.held.opened += 1

    def logged(self, name: str) -> set[int]:
        return {step for step, values in self.held.points if name in values}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        failure = self.fails(self.tried)
        self.tried += 1
        if failure is None or self.arrives:
            self.held.points.append((step, values))
        if failure is not None:
            raise failure

    def close(self) -> None:
        self.held.closed += 1


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_RETRY_S", 0.01)
    monkeypatch.setattr(follow, "_RETRY_MOST_S", 0.02)


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline, "it did not happen in 20 s"
        time.sleep(0.005)


def started(tracker: FakeTracker, store: MemoryStore) -> tuple[threading.Thread, threading.Event]:
    stop = threading.Event()
    thread = threading.Thread(target=Follower("fake", tracker, store, KEYS).run, args=(stop, 0.01), daemon=True)
    thread.start()
    return thread, stop


def test_points_are_sent_as_records_appear_and_the_last_ones_when_it_is_stopped() -> None:
    store, held = run_store(2), Held()
    thread, stop = started(FakeTracker(held), store)
    until(lambda: held.steps == [0, 1])
    add_step(store, 2)
    until(lambda: held.steps == [0, 1, 2])
    stop.set()
    thread.join(20)
    add_step(store, 3)
    assert held.steps == [0, 1, 2] and not thread.is_alive() and held.closed == 1
    follow_once(FakeTracker(held), store)
    assert held.steps == [0, 1, 2, 3]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("arrives", [False, True], ids=["the point is lost", "only the answer is lost"])
def test_a_failure_is_retried_and_no_point_is_lost_or_doubled(arrives: bool) -> None:
    store, held = run_store(8), Held()
    tracker = FakeTracker(held, lambda n: Broken("503") if n % 3 == 1 else None, arrives=arrives)
    with capture_logs() as logs:
        thread, stop = started(tracker, store)
        until(lambda: held.steps == list(range(8)))
        stop.set()
        thread.join(20)
    assert held.steps == list(range(8)) and held.opened == held.closed > 1
    assert {(line["event"], line["tracker"], line["reason"]) for line in logs} == {
        ("tracker failed", "fake", "Broken: 503")
    }


@pytest.mark.usefixtures("at_once")
def test_a_record_that_can_not_be_read_is_told_and_tried_again() -> None:
    store, held = run_store(1), Held()
    key = KEYS.step_record(1)
    store.objects[key] = b"{}"
    with capture_logs() as logs:
        thread, stop = started(FakeTracker(held), store)
        until(lambda: len(logs) > 1)
        del store.objects[key]
        add_step(store, 1)
        until(lambda: held.steps == [0, 1])
        stop.set()
        thread.join(20)
    assert "not a step record" in logs[0]["reason"]


def config(*kinds: str) -> Any:
    return parse(
        {
            "name": "r",
            "model": {"path": "m"},
            "data": {"prompts": "p.jsonl"},
            "training": {"steps": 1},
            "trackers": [{"kind": kind} for kind in kinds],
        },
        "test",
    )


def test_without_trackers_nothing_runs_beside_the_worker(tmp_path: Path) -> None:
    assert tracking.trackers(config(), run_store(), KEYS, tmp_path) == []


async def test_the_last_points_are_sent_when_the_worker_stops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store, held = run_store(1), Held()
    monkeypatch.setattr(tracking, "make_tracker", lambda section, folder: FakeTracker(held))
    (beside,) = tracking.trackers(config("mlflow"), store, KEYS, tmp_path)
    task = asyncio.ensure_future(beside)
    async with asyncio.timeout(20):
        while held.steps != [0]:
            await asyncio.sleep(0.01)
    add_step(store, 1)  # the follower sleeps for POLL_S now
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held.steps == [0, 1] and held.closed == 1


async def test_a_tracker_that_hangs_holds_up_neither_the_loop_nor_the_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    release, held = threading.Event(), Held()

    class Hanging(FakeTracker):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            release.wait(60)

    made = iter([Hanging(held), FakeTracker(held)])
    monkeypatch.setattr(tracking, "make_tracker", lambda section, folder: next(made))
    monkeypatch.setattr(tracking, "_CLOSE_S", 0.3)
    (beside,) = tracking.trackers(config("wandb", "mlflow"), run_store(3), KEYS, tmp_path)
    task = asyncio.ensure_future(beside)
    async with asyncio.timeout(20):
        while held.steps != [0, 1, 2]:  # the other one is not held up
            await asyncio.sleep(0.01)
    with capture_logs() as logs:
        task.cancel()
        await asyncio.sleep(0.05)
        task.cancel()  # the loop's own end does so too
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(20):
                await task
    assert [line["trackers"] for line in logs] == [["tracker-wandb"]]
    release.set()
