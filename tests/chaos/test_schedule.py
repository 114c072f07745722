"""A schedule is a function of its seed, and a few seeds reach every family of faults."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from tests.chaos.schedule import COMMIT_POINTS, KINDS, PROCESSES, schedule, select


def test_a_seed_is_a_schedule() -> None:
    for seed in range(50):
        assert schedule(seed, KINDS, steps=10, count=3) == schedule(seed, KINDS, steps=10, count=3)
    assert len({str(schedule(seed, KINDS, steps=10, count=3)) for seed in range(50)}) > 40


def test_faults_leave_room_for_the_run_to_go_on() -> None:
    for seed in range(200):
        plan = schedule(seed, KINDS, steps=10, count=3)
        assert sum(fault.gap for fault in plan.faults) <= 10 - 3
        assert all(fault.gap >= 1 for fault in plan.faults)


def test_seven_seeds_in_a_row_reach_every_family_and_a_thousand_every_kind() -> None:
    for globs in ("*:*worker", "machine*", "kill:engine*", "hang:*", "s*"):
        assert any(fnmatchcase(f.kind, globs) for s in range(14) for f in schedule(s, KINDS, steps=10, count=3).faults)
    reached = {fault.kind for seed in range(1000) for fault in schedule(seed, KINDS, steps=10, count=3).faults}
    assert reached == set(KINDS)


def test_every_process_and_commit_point_has_its_kinds() -> None:
    assert {f"{verb}:{name}" for verb in ("kill", "hang", "pause") for name in PROCESSES} <= set(KINDS)
    assert {f"{moment}:{name}" for moment in ("before", "after") for name in COMMIT_POINTS} <= set(KINDS)


def test_kinds_are_chosen_by_glob_and_an_unknown_one_is_refused() -> None:
    assert select(["kill:engine*"]) == ["kill:engine", "kill:engine-core"]
    with pytest.raises(ValueError, match="no such kind"):
        select(["kill:nobody"])
    assert {f.kind for f in schedule(3, ["kill:s3"], steps=10, count=2).faults} == {"kill:s3"}
