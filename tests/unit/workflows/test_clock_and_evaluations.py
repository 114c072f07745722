"""The run's small policies: when the STUCK clock strikes, which versions are evaluated."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from roadstead.workflows.evaluations import Evaluations
from roadstead.workflows.messages import EvaluationPlan
from roadstead.workflows.stuck_clock import StuckClock

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def test_the_clock_strikes_after_its_limit_of_unbroken_waiting_and_begins_anew() -> None:
    clock = StuckClock(10)
    assert not clock.look(at(0), stuck=True) and clock.due == at(10)
    assert not clock.look(at(9.9), stuck=True)
    assert not clock.look(at(9.95), stuck=False) and clock.due is None, "the waiting was broken"
    assert not clock.look(at(20), stuck=True)
    assert clock.look(at(30), stuck=True) and clock.since is None
    assert not clock.look(at(30), stuck=True) and clock.due == at(40), "those who come next have their full time"


def test_a_clock_without_a_limit_tells_since_when_and_never_strikes() -> None:
    clock = StuckClock(None)
    assert not clock.look(at(0), stuck=True) and not clock.look(at(1e6), stuck=True)
    assert clock.since == NOON and clock.due is None


def due(evaluations: Evaluations, versions: range) -> list[int]:
    found = []
    for version in versions:
        if evaluations.is_due(version):
            evaluations.begin(version)
            found.append(version)
    return found


def test_first_every_kth_and_last_version_are_due_once() -> None:
    plan = EvaluationPlan(every=4, prompts=2, timeout_s=1)
    evaluations = Evaluations(plan, 10, -1, [])
    assert due(evaluations, range(11)) == [0, 4, 8, 10] and due(evaluations, range(11)) == []
    assert evaluations.under_way == [0, 4, 8, 10]
    evaluations.end(4)
    evaluations.end(4)
    assert evaluations.under_way == [0, 8, 10]


def test_a_resume_asks_for_the_version_it_begins_at_and_for_no_older_one() -> None:
    plan = EvaluationPlan(every=4, prompts=2, timeout_s=1)
    assert due(Evaluations(plan, 10, 7, []), range(11)) == [8, 10]
    assert due(Evaluations(None, 10, -1, []), range(11)) == []
