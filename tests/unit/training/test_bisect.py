"""The search for the smallest cure, against oracles whose answer is known."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadstead.training.bisect import Cure, default_threshold, smallest_cure

Rows = frozenset[int]
UNLIMITED = 1_000_000


@st.composite
def batches(draw: st.DrawFn) -> list[list[int]]:
    """Rows 0, 1, ... in groups of any size."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=12))
    rows = iter(range(sum(sizes)))
    return [[next(rows) for _ in range(size)] for size in sizes]


@st.composite
def planted(draw: st.DrawFn, most: int = 5) -> tuple[list[list[int]], Rows]:
    groups = draw(batches())
    rows = [row for group in groups for row in group]
    return groups, frozenset(draw(st.sets(st.sampled_from(rows), min_size=1, max_size=most)))


class Oracle:
    """Counts, and fails when it is asked what the caller knows or has asked before."""

    def __init__(self, groups: list[list[int]], cures: Callable[[Rows], bool]) -> None:
        self._all = frozenset(row for group in groups for row in group)
        self._cures = cures
        self.asked: list[Rows] = []

    def __call__(self, removed: Rows) -> bool:
        assert removed and removed < self._all
        assert removed not in self.asked
        self.asked.append(removed)
        return self._cures(removed)

    def knows(self, removed: Rows) -> bool:
        return removed == self._all or (bool(removed) and self._cures(removed))


def assert_minimal(found: Cure[int], oracle: Oracle) -> None:
    assert found.minimal
    assert oracle.knows(found.removed)
    for row in found.removed:
        assert not oracle.knows(found.removed - {row}), f"{row} was not needed"


@given(planted())
def test_all_planted_rows_are_found_and_no_other(case: tuple[list[list[int]], Rows]) -> None:
    groups, bad = case
    oracle = Oracle(groups, lambda removed: bad <= removed)
    found = smallest_cure(groups, oracle, UNLIMITED)
    assert found == Cure(bad, True, len(oracle.asked))


@given(batches(), st.data())
def test_one_of_several_cures_is_found_whole(groups: list[list[int]], data: st.DataObject) -> None:
    """Monotone, but with more than one smallest answer."""
    rows = [row for group in groups for row in group]
    cures = data.draw(st.lists(st.frozensets(st.sampled_from(rows), min_size=1, max_size=4), min_size=1, max_size=4))
    oracle = Oracle(groups, lambda removed: any(cure <= removed for cure in cures))
    found = smallest_cure(groups, oracle, UNLIMITED)
    assert_minimal(found, oracle)
    assert found.removed in cures


@given(batches(), st.integers(0, 2**32), st.floats(0.05, 0.9))
def test_any_test_at_all_ends_1_minimal(groups: list[list[int]], seed: int, share: float) -> None:
    """Not monotone: whether a removal cures is as good as random."""

    def cures(removed: Rows) -> bool:
        digest = hashlib.sha256(f"{seed} {sorted(removed)}".encode()).digest()
        return digest[0] < 256 * share

    oracle = Oracle(groups, cures)
    assert_minimal(smallest_cure(groups, oracle, UNLIMITED), oracle)


@given(planted(), st.integers(0, 40))
def test_budget_is_kept_and_what_was_found_cures(case: tuple[list[list[int]], Rows], budget: int) -> None:
    groups, bad = case
    oracle = Oracle(groups, lambda removed: bad <= removed)
    found = smallest_cure(groups, oracle, budget)
    assert found.questions == len(oracle.asked) <= budget
    assert bad <= found.removed
    whole = smallest_cure(groups, Oracle(groups, lambda removed: bad <= removed), UNLIMITED)
    assert found.minimal == (whole.questions <= budget)
    if found.minimal:
        assert found == whole


@pytest.mark.parametrize(("bad", "most"), [({0}, 6), ({63}, 12), ({17, 40}, 30), ({0, 1, 2, 3}, 14)])
def test_questions_in_a_batch_of_64(bad: set[int], most: int) -> None:
    groups = [list(range(g * 8, g * 8 + 8)) for g in range(8)]
    found = smallest_cure(groups, lambda removed: bad <= removed, UNLIMITED)
    assert found.removed == bad
    assert found.questions <= most


def test_suspects_that_come_first_cost_less() -> None:
    bad = {5, 21, 37, 53}
    groups = [list(range(g * 8, g * 8 + 8)) for g in range(8)]
    suspects_first = sorted((sorted(g, key=lambda row: row not in bad) for g in groups), key=lambda g: g[0] not in bad)
    in_order = smallest_cure(groups, lambda removed: bad <= removed, UNLIMITED)
    cheaper = smallest_cure(suspects_first, lambda removed: bad <= removed, UNLIMITED)
    assert in_order.removed == cheaper.removed == bad
    assert cheaper.questions < 32 < in_order.questions


def test_a_batch_of_one_row_needs_no_question() -> None:
    assert smallest_cure([[7]], lambda removed: pytest.fail("asked"), 0) == Cure(frozenset({7}), True, 0)


def test_default_threshold_is_not_moved_by_an_earlier_sick_step() -> None:
    ordinary = [1.0, 1.1, 0.9, 1.2, 0.8, 1.0, 1.1, 0.9]
    threshold = default_threshold(ordinary)
    # Median 1.0, MAD 0.1.
    assert threshold == pytest.approx(2.0)
    spread = [1.0, 1.5, 0.5, 1.6, 0.4]
    assert default_threshold(spread) == pytest.approx(1.0 + 6 * 1.4826 * 0.5)
    assert default_threshold([*spread, 900.0, float("inf")]) < 10
    assert default_threshold([-v for v in spread]) == default_threshold(spread)


def test_default_threshold_needs_a_past() -> None:
    with pytest.raises(ValueError, match="only 4 earlier step"):
        default_threshold([1.0, 1.0, 1.0, 1.0, float("nan")])
