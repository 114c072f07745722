"""Symptom: advantages that do not follow from the rewards.

Owns: the recomputation up to scale. Whatever the normalisation, a group-relative advantage is a rising straight line
through the group's mean reward: A = c (r - mean), c > 0, and zero when all rewards are equal.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from roadstead.storage.audit.checks.base import most
from roadstead.storage.audit.evidence import Evidence
from roadstead.storage.audit.report import Finding

_TOLERANCE = 1e-3
"""Of the group's largest advantage: they are stored as float32."""


class Advantages:
    name = "advantages"

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        rows = evidence.rows
        if rows.empty:
            return
        finite = np.isfinite(rows["reward"].astype(float)) & np.isfinite(rows["advantage"])
        known = rows[finite & ~rows["reward_missing"]]
        keys = [known["step"], known["slot"]]
        centred = known["reward"] - known.groupby(keys)["reward"].transform("mean")
        top = (centred * known["advantage"]).groupby(keys).transform("sum")
        bottom = (centred**2).groupby(keys).transform("sum")
        slope = np.where(bottom > 1e-18, top / np.maximum(bottom, 1e-18), 0.0)
        scale = np.maximum(known["advantage"].abs().groupby(keys).transform("max"), 1e-6)
        off = ((known["advantage"] - slope * centred).abs() > _TOLERANCE * scale) | (slope < 0)
        groups = known[off].drop_duplicates(["step", "slot"])
        if len(groups):
            found = known[off]
            row = most(found, (found["advantage"] - (slope * centred)[found.index]).abs())
            yield evidence.finding(
                self.name,
                "critical",
                0.9,
                f"advantages of {len(groups)} group(s) do not follow from their rewards",
                f"worst: {row.group_id} member {row.member} in step {row.step}, reward {row.reward:g}, advantage "
                f"{row.advantage:g}; within a group they must be a straight line through the mean reward",
                found,
            )
