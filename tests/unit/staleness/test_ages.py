"""Exact ages from the columns of a batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadstead.staleness import AgeStatistics


def test_of_one_batch() -> None:
    ages = AgeStatistics.of([(5, 5, True), (5, 4, True), (5, 4, True), (5, 2, True)])
    assert (ages.maximum, ages.mean, ages.p99) == (3, 1.25, 3)
    assert ages.histogram == ((0, 1), (1, 2), (3, 1))
    assert ages.count == 4


def test_rows_without_a_meaningful_age_are_left_out() -> None:
    ages = AgeStatistics.of([(9, 8, True), (9, 0, False), (9, None, True), (9, 12, False)])
    assert (ages.count, ages.maximum) == (1, 1)


def test_no_rows() -> None:
    assert AgeStatistics.of([]) == AgeStatistics(None, None, None, ())
    assert AgeStatistics.of([(1, 0, False)]).count == 0


@pytest.mark.parametrize(("young", "p99"), [(98, 7), (99, 0), (198, 0), (197, 7)])
def test_p99_is_the_nearest_rank(young: int, p99: int) -> None:
    """Of 100 rows the 99th, of 200 the 198th: exact where interpolation would invent an age between."""
    total = 100 if young < 100 else 200
    rows = [(7, 7, True)] * young + [(7, 0, True)] * (total - young)
    assert AgeStatistics.of(rows).p99 == p99


@given(st.lists(st.integers(0, 9), min_size=1, max_size=300))
def test_p99_by_its_definition(ages: list[int]) -> None:
    enough = [age for age in sorted(ages) if sum(other <= age for other in ages) * 100 >= 99 * len(ages)]
    assert AgeStatistics.of((10, 10 - age, True) for age in ages).p99 == enough[0]


def test_a_version_from_the_future_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head_version: 6 is newer than step: 5"):
        AgeStatistics.of([(5, 6, True)])
