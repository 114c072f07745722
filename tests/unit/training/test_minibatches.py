"""Properties of the split over optimizer steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadstead.training.minibatches import plan_minibatches

MEMBERS = st.lists(st.integers(1, 5), min_size=1, max_size=12)
"""Rows of each group."""
COUNT = st.integers(1, 12)


def groups_of(members: list[int]) -> list[int]:
    return [group for group, rows in enumerate(members) for _ in range(rows)]


@given(MEMBERS, COUNT)
def test_every_row_once_and_no_group_is_split(members: list[int], count: int) -> None:
    groups = groups_of(members)
    plan = plan_minibatches(groups, count)
    assert sorted(row for part in plan for row in part) == list(range(len(groups)))
    assert len(plan) == min(count, len(members))
    owners = [{groups[row] for row in part} for part in plan]
    assert sum(len(owned) for owned in owners) == len(members)
    assert max(map(len, owners)) - min(map(len, owners)) <= 1


@given(MEMBERS)
def test_one_is_the_batch_in_its_order(members: list[int]) -> None:
    assert plan_minibatches(groups_of(members), 1) == [list(range(sum(members)))]


@given(MEMBERS, COUNT, st.data())
def test_rows_that_are_left_stay_where_they_were(members: list[int], count: int, data: st.DataObject) -> None:
    groups = groups_of(members)
    kept = data.draw(st.lists(st.sampled_from(range(len(groups))), min_size=1, unique=True).map(sorted))
    whole = plan_minibatches(groups, count)
    some = plan_minibatches([groups[row] for row in kept], count)
    assert [[kept[i] for i in part] for part in some] == [
        left for part in whole if (left := [row for row in part if row in kept])
    ]


def test_groups_are_dealt_in_turn() -> None:
    assert plan_minibatches([0, 0, 1, 1, 2, 2], 2) == [[0, 1, 4, 5], [2, 3]]


def test_refuses_a_count_of_nothing() -> None:
    with pytest.raises(ValueError, match="count 0"):
        plan_minibatches([0], 0)
