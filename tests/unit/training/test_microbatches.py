"""Properties of the micro-batch plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadstead.training.microbatches import plan_microbatches

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=60)
RANKS = st.integers(1, 5)
BUDGET = st.integers(1, 400)


@given(LENGTHS, RANKS, BUDGET)
def test_every_row_once_and_ranks_alike(lengths: list[int], ranks: int, budget: int) -> None:
    plan = plan_microbatches(lengths, ranks, budget)
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(len(lengths)))
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    for rank in plan:
        assert all(rank[:-1]), "a dummy is a rank's last micro-batch"


@given(LENGTHS, RANKS, BUDGET)
def test_padded_size_within_the_budget(lengths: list[int], ranks: int, budget: int) -> None:
    for rank in plan_microbatches(lengths, ranks, budget):
        for micro in rank:
            padded = len(micro) * max((lengths[i] for i in micro), default=0)
            assert padded <= budget or len(micro) == 1


@given(LENGTHS, RANKS, BUDGET)
def test_deterministic(lengths: list[int], ranks: int, budget: int) -> None:
    assert plan_microbatches(lengths, ranks, budget) == plan_microbatches(list(lengths), ranks, budget)


def test_a_large_budget_still_uses_every_rank() -> None:
    assert plan_microbatches([5] * 4, 2, 10_000) == [[[0, 1]], [[2, 3]]]


def test_fewer_rows_than_ranks_gives_dummies() -> None:
    assert plan_microbatches([5, 7], 3, 100) == [[[1]], [[0]], [[]]]


def test_refuses_a_budget_of_nothing() -> None:
    with pytest.raises(ValueError, match="budget 0"):
        plan_microbatches([1], 1, 0)
