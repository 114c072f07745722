"""What a check is, and the robust statistics that checks share.

Owns: the `Check` interface; medians, spreads and z-scores that a few wild rows can't move. Never touches: the store.
Invariant: a check only reads the evidence; what it is unsure about it says in `confidence`.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import pandas as pd

from roadstead.storage.audit.evidence import Evidence
from roadstead.storage.audit.report import Finding

SURE_Z = 6.0
"""Standard errors that count as more than chance. A run of 1,000 steps asks some 10,000 questions of this kind; under
the normal law 6 errors by chance in 2e-9 of them leave room for tails fatter than normal."""


class Check(Protocol):
    name: str

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """Findings about `evidence`, most telling first; nothing when all is well."""
        ...


def most(rows: pd.DataFrame, values: object) -> Any:
    """The row of `rows` whose value ([R]) is largest."""
    return rows.iloc[int(np.argmax(np.asarray(values)))]


def spread(values: np.ndarray) -> float:
    """Standard deviation as the median absolute deviation has it (times 1.4826: equal for normal values)."""
    return float(1.4826 * np.median(np.abs(values - np.median(values)))) if len(values) else 0.0


def median_error(values: np.ndarray) -> float:
    """Standard error of the median: 1.2533 sd / sqrt(n) for normal values."""
    return float(1.2533 * spread(values) / max(1.0, len(values)) ** 0.5)


def separation(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """(difference of the medians, the same in standard errors). The floor keeps equal values from dividing by zero."""
    difference = float(np.median(one) - np.median(other))
    error = float(np.hypot(median_error(one), median_error(other)))
    return difference, abs(difference) / max(error, 1e-9)


def windows(steps: np.ndarray, shortest: int) -> list[tuple[int, int]]:
    """[first, end) step ranges: the whole, then halves, quarters, ... half-overlapping, down to `shortest` steps.

    A fault that lasted a tenth of the run is diluted in the whole and plain in one of these.
    """
    first, end = int(steps.min()), int(steps.max()) + 1
    found, size = [(first, end)], (end - first) // 2
    while size >= shortest:
        found += [(begin, begin + size) for begin in range(first, end - size + 1, max(1, size // 2))]
        size //= 2
    return found


def first_lasting(by_step: pd.Series, over: float) -> int | None:
    """First step whose value is over `over` and stays there: the median of it and the next four is over it too."""
    values = by_step.sort_index()
    for i, step in enumerate(values.index):
        if values.iloc[i] > over and float(np.median(values.iloc[i : i + 5])) > over:
            return int(step)
    return None


def listed(names: list[str] | tuple[str, ...], most: int = 5) -> str:
    more = len(names) - most
    return ", ".join(str(name) for name in names[:most]) + (f" and {more} more" if more > 0 else "")
