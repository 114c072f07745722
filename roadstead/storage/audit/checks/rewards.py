"""Symptom: rewards far outside what the rest of the run gets, and whose they are.

Owns: the search for an environment, prompt template, prompt or engine whose rewards stand apart, then for single rows.
Method: each level of a factor (one template, say) is compared with the rows that are NOT of it: their 2 % to 98 %
range, widened on both sides by its own width. A poisoned tenth of the rows would move a mean or a standard deviation
enough to hide in it; it can't move the range of the others. Of several levels that explain the same rows, the one
with the best F1 (precise and complete) is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from roadstead.storage.audit.checks.base import most
from roadstead.storage.audit.evidence import Evidence
from roadstead.storage.audit.report import Finding

_FACTORS = ("environment", "template", "opening", "prompt_id", "engine_id")
"""Broadest first: of two that explain equally well, the broader is the likelier cause."""
_NAMES = {
    "environment": "environment",
    "template": "prompt template",
    "opening": "prompts that begin with",
    "prompt_id": "prompt",
    "engine_id": "engine",
}
_LEAST_LEVEL, _LEAST_REST = 4, 20
"""Rows: a median of fewer than 4 is anybody's; a range of fewer than 20 is not known to its 2 %."""
_SINGLE = 2.0
"""Widths beyond the range for a single row: 10 standard deviations of normal rewards."""
_FLOOR = 1.0
"""Rewards are of order 1 (see the epsilon of the advantages): when all others are equal, a reward of 1 more is not yet
strange, an exam that one prompt passes looks like that."""


@dataclass(frozen=True)
class _Level:
    factor: str
    value: str
    outlying: pd.Index
    median: float
    low: float
    high: float
    f1: float = 0.0


class OutlyingRewards:
    name = "outlying-reward"

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        rows = evidence.rows
        if rows.empty:
            return
        rows = rows[~rows["reward_missing"] & np.isfinite(rows["reward"].astype(float))]
        levels = [level for factor in _FACTORS for level in _levels(rows, factor)]
        explained: set[int] = set()
        while levels:
            everything = set().union(*(set(level.outlying) for level in levels))
            best = max(levels, key=lambda level: (_f1(rows, level, everything), -_FACTORS.index(level.factor)))
            yield self._finding(evidence, rows, best)
            explained |= set(best.outlying)
            levels = [level for level in levels if len(set(level.outlying) - explained) > 0.2 * len(level.outlying)]
        rest = rows[~rows.index.isin(explained)]
        if len(rest) >= _LEAST_REST:
            low, high, width = _range(rest["reward"].to_numpy(dtype=float))
            wild = rest[(rest["reward"] < low - _SINGLE * width) | (rest["reward"] > high + _SINGLE * width)]
            if len(wild):
                worst = most(wild, (wild["reward"] - (low + high) / 2).abs())
                yield evidence.finding(
                    self.name,
                    "warning",
                    0.8,
                    f"{len(wild)} single row(s) with outlying rewards, up to {worst.reward:g}",
                    f"{len(wild)} of {len(rest)} rows; 96 % of the others lie in {low:g} to {high:g}. "
                    "No environment, template, prompt or engine stands out",
                    wild.sort_values("reward", key=lambda r: -(r - (low + high) / 2).abs()),
                )

    def _finding(self, evidence: Evidence, rows: pd.DataFrame, level: _Level) -> Finding:
        member = rows[rows[level.factor] == level.value]
        outlying = rows.loc[level.outlying]
        return evidence.finding(
            self.name,
            "warning",
            0.95 if len(outlying) >= 0.8 * len(member) else 0.8,
            f"{_NAMES[level.factor]} {level.value!r} has outlying rewards, median {level.median:g}",
            f"{len(outlying)} of its {len(member)} rows lie outside the range of all rows that are not of it "
            f"({level.low:g} to {level.high:g}, 2 % to 98 % of {len(rows) - len(member)} rows)",
            outlying,
        )


def _range(values: np.ndarray) -> tuple[float, float, float]:
    low, high = (float(q) for q in np.quantile(values, [0.02, 0.98]))
    return low, high, max(high - low, _FLOOR)


def _levels(rows: pd.DataFrame, factor: str) -> Iterator[_Level]:
    rewards = rows["reward"].to_numpy(dtype=float)
    if len(rows) < _LEAST_REST:
        return
    low_all, high_all, width_all = _range(rewards)
    medians = rows.groupby(factor)["reward"].agg(["median", "size"])
    for value, (median, size) in medians.iterrows():
        # Cheap test first, on the range of all rows, poisoned ones included: nothing inside its middle can stand out.
        if size < _LEAST_LEVEL or size > len(rows) - _LEAST_REST:
            continue
        if len(medians) > 200 and low_all - width_all * 0.5 <= median <= high_all + width_all * 0.5:
            continue
        mine = (rows[factor] == value).to_numpy()
        low, high, width = _range(rewards[~mine])
        if low - width <= median <= high + width:
            continue
        outside = mine & ((rewards < low - width) | (rewards > high + width))
        yield _Level(factor, str(value), rows.index[outside], float(median), low, high)


def _f1(rows: pd.DataFrame, level: _Level, everything: set[int]) -> float:
    precision = len(level.outlying) / max(1, int((rows[level.factor] == level.value).sum()))
    recall = len(set(level.outlying) & everything) / max(1, len(everything))
    return round(2 * precision * recall / max(1e-9, precision + recall), 6)
