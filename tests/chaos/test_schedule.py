"""A schedule is a function of its seed, and a few seeds reach every family of faults."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from tests.chaos.features import FEATURES, changes, features
from tests.chaos.schedule import COMMIT_POINTS, KINDS, PROCESSES, needs, schedule, select


def test_a_seed_is_a_schedule() -> None:
    for seed in range(50):
        assert schedule(seed, KINDS, steps=10, count=3) == schedule(seed, KINDS, steps=10, count=3)
    assert len({str(schedule(seed, KINDS, steps=10, count=3)) for seed in range(50)}) > 40


def test_faults_leave_room_for_the_run_to_go_on() -> None:
    for seed in range(200):
        plan = schedule(seed, KINDS, steps=10, count=3)
        assert sum(fault.gap for fault in plan.faults) <= 10 - 3
        assert all(fault.gap >= 1 for fault in plan.faults)


def test_seven_seeds_in_a_row_reach_every_family_and_some_thousand_every_kind() -> None:
    for globs in ("*:*worker", "machine*", "kill:engine*", "hang:*", "s*"):
        assert any(fnmatchcase(f.kind, globs) for s in range(14) for f in schedule(s, KINDS, steps=10, count=3).faults)
    reached = {fault.kind for seed in range(6000) for fault in schedule(seed, KINDS, steps=10, count=3).faults}
    assert reached == set(KINDS)


def test_every_process_and_commit_point_has_its_kinds() -> None:
    assert {f"{verb}:{name}" for verb in ("kill", "hang", "pause") for name in PROCESSES} <= set(KINDS)
    assert {f"{moment}:{name}" for moment in ("before", "after") for name in COMMIT_POINTS} <= set(KINDS)


def test_kinds_are_chosen_by_glob_and_an_unknown_one_is_refused() -> None:
    assert select(["kill:engine*"]) == ["kill:engine", "kill:engine-core", "kill:engine-1"]
    with pytest.raises(ValueError, match="no such kind"):
        select(["kill:nobody"])
    assert {f.kind for f in schedule(3, ["kill:s3"], steps=10, count=2).faults} == {"kill:s3"}


def test_a_seed_has_its_features_and_some_seeds_have_none() -> None:
    seen = [features(seed) for seed in range(300)]
    assert seen == [features(seed) for seed in range(300)]
    assert {name for names in seen for name in names} == set(FEATURES)
    assert 60 < seen.count(()) < 200
    assert [schedule(seed, KINDS, steps=10, count=3).features for seed in (20, 21, 22)] == [
        (),
        ("evaluation", "minibatches", "stuck-clock"),
        ("filters", "dead-letters"),
    ]


def test_a_fault_that_needs_a_feature_strikes_a_run_that_has_it() -> None:
    for seed in range(1000):
        plan = schedule(seed, KINDS, steps=10, count=3)
        assert {needs(fault.kind) for fault in plan.faults} <= {None, *plan.features}
        assert plan.features == features(seed)
    alone = schedule(1, ["hang:trainer-rank-1"], steps=10, count=1, given=())
    assert (alone.features, [fault.kind for fault in alone.faults]) == (("two-ranks",), ["hang:trainer-rank-1"])


def test_features_change_the_configuration_in_one_order_and_an_unknown_one_is_refused() -> None:
    both = changes(["dead-letters", "filters"])
    assert both == changes(["filters", "dead-letters"])
    assert both["data__environment"].endswith(":BrokenEnvironment")
    with pytest.raises(ValueError, match="no such feature; known: filters, extra-member"):
        changes(["coffee"])
