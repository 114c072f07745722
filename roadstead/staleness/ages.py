"""Ages of trained trajectories: buffer minus the oldest version among the tokens that the loss saw.

Owns: the exact statistics of the ages of one batch or many. Never touches: where the rows come from.
Invariant: the count is the number of rows that the running policy made and the loss saw; no estimate is made.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Self


@dataclass(frozen=True)
class AgeStatistics:
    """Ages in policy versions; the three numbers are None when no row counts."""

    maximum: int | None
    mean: float | None
    p99: int | None
    """Nearest rank: the smallest age that at least 99 % of the rows do not exceed."""
    histogram: tuple[tuple[int, int], ...]
    """(age, rows) by rising age, ages without rows left out."""

    @property
    def count(self) -> int:
        return sum(rows for _, rows in self.histogram)

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int | None, bool]]) -> Self:
        """From (step, head_version, from_live_policy) a trajectory, the columns of a batch of these names.

        Rows that the running policy did not make (from_live_policy False: replayed, written by a teacher) have no
        meaningful age, and rows without a loss-masked token (head_version None) have none: both are left out.
        Raises ValueError on a version newer than the step, which no policy of that step can have made.
        """
        ages: Counter[int] = Counter()
        for step, head, live in rows:
            if not live or head is None:
                continue
            if head > step:
                raise ValueError(f"head_version: {head} is newer than step: {step}; the row was labelled wrongly")
            ages[step - head] += 1
        count = ages.total()
        if not count:
            return cls(None, None, None, ())
        histogram = tuple(sorted(ages.items()))
        rank = -(-99 * count // 100)
        upto = zip(accumulate(n for _, n in histogram), histogram, strict=True)
        p99 = next(age for seen, (age, _) in upto if seen >= rank)
        mean = sum(age * n for age, n in histogram) / count
        return cls(histogram[-1][0], mean, p99, histogram)
