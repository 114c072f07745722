"""The smallest set of rows whose removal cures a step: the search, without the trainer.

Owns: delta debugging under a budget, the default of what counts as sick.
Never touches: tensors, the store; it asks a function that somebody else answers.
Invariant: what comes back cures, whenever the search ends. `minimal` is claimed only when the removal of each
proper subset with one row less was asked and does not cure (1-minimality; for a test that can only get better by
removing more, that is a smallest cure inside those rows). No question is asked twice, nor past the budget.
A crash leaves: nothing, it is pure.

The algorithm is ddmin of Zeller and Hildebrandt 2002, "Simplifying and Isolating Failure-Inducing Input", IEEE
Transactions on Software Engineering 28(2), with "the removal cures" in the place of "the input fails".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

FEWEST_STEPS = 5
"""Steps below which the spread of a metric says nothing."""
RECENT_STEPS = 50
"""Steps that the default threshold looks back: further back the policy was another one."""
_SPREADS = 6.0
"""Standard deviations that are still ordinary. Gradient norms have long tails: 3 would call one step in 30 sick."""
_NORMAL = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""


@dataclass(frozen=True)
class Cure(Generic[T]):
    removed: frozenset[T]
    """Its removal cures; all rows when nothing smaller was found."""
    minimal: bool
    """Putting any single row back makes the step sick again. False: the budget ended first."""
    questions: int


class _BudgetSpent(Exception):
    pass


def smallest_cure(groups: Sequence[Sequence[T]], cures: Callable[[frozenset[T]], bool], budget: int) -> Cure[T]:
    """Search groups first, then the rows of the groups that were found.

    groups: the rows of each group. Suspects that stand first, in their group and among the groups, cost fewer
    questions; the answer cures whatever the order.
    cures(removed): whether the step without those rows is well. It is never asked about no rows (the caller knows
    that the step is sick) nor about all of them (a step without rows is well). budget: most questions asked.
    """
    search = _Search(frozenset(row for group in groups for row in group), cures, budget)
    try:
        found = search.reduce([frozenset(group) for group in groups])
        # The first of each group, then the second of each, ...: suspects stand side by side.
        members = chain.from_iterable(zip_longest(*(group for group in groups if frozenset(group) in found)))
        search.reduce([frozenset([row]) for row in members if row is not None])
    except _BudgetSpent:
        return Cure(search.best, False, search.questions)
    return Cure(search.best, True, search.questions)


class _Search(Generic[T]):
    def __init__(self, rows: frozenset[T], cures: Callable[[frozenset[T]], bool], budget: int) -> None:
        self._cures, self._budget = cures, budget
        self._known: dict[frozenset[T], bool] = {frozenset(): False, rows: True}
        self.best = rows
        self.questions = 0

    def reduce(self, units: list[frozenset[T]]) -> list[frozenset[T]]:
        """Units of which none can be put back. Together, `units` must cure. Raises _BudgetSpent."""
        parts = 2
        while len(units) > 1:
            chunks = _split(units, parts)
            smaller = next((chunk for chunk in chunks if self._cured_by(chunk)), None)
            if smaller is not None:
                units, parts = smaller, 2
                continue
            # Of two chunks, each is the other's complement.
            rests = [[u for u in units if u not in chunk] for chunk in chunks] if len(chunks) > 2 else []
            smaller = next((rest for rest in rests if self._cured_by(rest)), None)
            if smaller is not None:
                units, parts = smaller, max(parts - 1, 2)
            elif parts >= len(units):
                break
            else:
                parts = min(2 * parts, len(units))
        return units

    def _cured_by(self, units: list[frozenset[T]]) -> bool:
        removed = frozenset[T]().union(*units)
        if removed not in self._known:
            if self.questions == self._budget:
                raise _BudgetSpent
            self.questions += 1
            self._known[removed] = self._cures(removed)
            if self._known[removed] and len(removed) < len(self.best):
                self.best = removed
        return self._known[removed]


def _split(units: list[frozenset[T]], parts: int) -> list[list[frozenset[T]]]:
    """`parts` runs of nearly equal length, none empty."""
    bounds = [i * len(units) // parts for i in range(parts + 1)]
    return [units[a:b] for a, b in pairwise(bounds)]


def default_threshold(values: Sequence[float]) -> float:
    """What a metric's magnitude may reach before the step counts as sick: median + 6 robust standard deviations.

    values: of the steps before it, any sign, any order. The spread is 1.4826 times the median absolute deviation
    from the median, so that an earlier sick step does not widen it; the result is at least twice the median, for
    runs whose steps hardly differ. Raises ValueError when fewer than 5 values are finite.
    """
    sizes = [abs(value) for value in values if math.isfinite(value)]
    if len(sizes) < FEWEST_STEPS:
        raise ValueError(
            f"threshold: only {len(sizes)} earlier step(s) have the metric on record, a default needs "
            f"{FEWEST_STEPS}; give --threshold"
        )
    median = statistics.median(sizes)
    spread = _NORMAL * statistics.median(abs(size - median) for size in sizes)
    return max(median + _SPREADS * spread, 2 * median)
