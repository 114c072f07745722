"""Symptom: response lengths or truncation jump, at a step or on one engine.

Owns: the comparison of five steps before and after, and of one engine with the others, over group means (members of a
group share their prompt, so rows are not independent). Slow growth is what training does; only jumps count.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from roadstead.storage.audit.checks.base import SURE_Z, separation, windows
from roadstead.storage.audit.evidence import Evidence
from roadstead.storage.audit.report import Finding

_STEPS = 5
_LEAST_GROUPS = 8
_TRUNCATED = 0.25
"""Jump of the share of truncated rows: a changed max_tokens or a lost stop token moves it to nearly all or none."""
_LENGTH = float(np.log(1.5))
"""Jump of the typical length, a factor of 1.5."""


class Lengths:
    name = "lengths"

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        rows = evidence.rows
        if rows.empty:
            return
        rows = rows[rows["from_live_policy"]]  # trajectories from elsewhere are as long as they are
        rows = rows.assign(
            cut=(rows["finish_reason"] == "length").astype(float), long=np.log(rows["tokens"].clip(lower=1))
        )
        groups = rows.groupby(["step", "group_id", "engine_id"], as_index=False)[["cut", "long"]].mean()
        yield from self._jump(evidence, rows, groups)
        yield from self._engine(evidence, rows, groups)

    def _jump(self, evidence: Evidence, rows: pd.DataFrame, groups: pd.DataFrame) -> Iterator[Finding]:
        best: tuple[float, int, str] | None = None
        step = groups["step"]
        for at in sorted(set(step))[1:]:
            before = groups[(step >= at - _STEPS) & (step < at)]
            after = groups[(step >= at) & (step < at + _STEPS)]
            if found := _apart(after, before):
                z, what = found
                if best is None or z > best[0]:
                    best = (z, int(at), what)
        if best:
            z, at, what = best
            yield evidence.finding(
                self.name,
                "warning",
                0.8,
                f"from step {at} on, {what}",
                f"the {_STEPS} steps from there against the {_STEPS} before, by groups, {z:.0f} standard errors: a "
                "changed max_tokens or stop condition, another prompt mix, or a policy that fell into long answers",
                rows[(rows["step"] >= at) & (rows["step"] < at + _STEPS)],
            )

    def _engine(self, evidence: Evidence, rows: pd.DataFrame, groups: pd.DataFrame) -> Iterator[Finding]:
        engines = sorted(set(groups["engine_id"]))
        best: tuple[float, str, tuple[int, int], str] | None = None
        for engine in engines if len(engines) > 1 else ():
            mine = groups["engine_id"] == engine
            for first, end in windows(groups["step"].to_numpy(), _STEPS):
                inside = (groups["step"] >= first) & (groups["step"] < end)
                if found := _apart(groups[mine & inside], groups[~mine & inside]):
                    z, what = found
                    if best is None or z > best[0]:
                        best = (z, engine, (first, end), what)
        if best:
            z, engine, (first, end), what = best
            yield evidence.finding(
                self.name,
                "warning",
                0.6 if len(engines) == 2 else 0.8,
                f"on engine {engine}, {what} on the other engine(s)",
                f"steps {first} to {end - 1}, by groups, {z:.0f} standard errors",
                rows[(rows["engine_id"] == engine) & (rows["step"] >= first) & (rows["step"] < end)],
            )


def _apart(one: pd.DataFrame, other: pd.DataFrame) -> tuple[float, str] | None:
    """(standard errors, in words) when truncation or length differ; None when they do not."""
    if min(len(one), len(other)) < _LEAST_GROUPS:
        return None
    share, before = float(one["cut"].mean()), float(other["cut"].mean())
    # 0.05: the spread of a share that happens to be all zeros is not zero.
    error = float(
        np.hypot(max(one["cut"].std(), 0.05) / len(one) ** 0.5, max(other["cut"].std(), 0.05) / len(other) ** 0.5)
    )
    found: list[tuple[float, str]] = []
    if abs(share - before) >= _TRUNCATED and abs(share - before) / error >= SURE_Z:
        found.append((abs(share - before) / error, f"{share:.0%} of the responses are cut off, against {before:.0%}"))
    gap, z = separation(one["long"].to_numpy(), other["long"].to_numpy())
    if abs(gap) >= _LENGTH and z >= SURE_Z:
        mine, theirs = np.exp(np.median(one["long"])), np.exp(np.median(other["long"]))
        words = f"responses have {mine:.0f} tokens, against {theirs:.0f}"
        found.append((min(z, 1e3), words))
    return max(found, default=None)
