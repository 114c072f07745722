"""Symptom: importance weights that staleness, or single rows, drive away from 1.

Owns: staleness against the share of capped tokens, and rows whose mean weight stands apart.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from roadstead.storage.audit.checks.base import most, spread
from roadstead.storage.audit.evidence import Evidence
from roadstead.storage.audit.report import Finding

_CAPPED, _CAPPED_TIMES = 0.10, 5.0
"""Share of capped tokens at one staleness, and against the freshest rows: a tenth of the gradient truncated."""
_LEAST_ROWS = 16
_ROW_LOG, _ROW_SPREADS = 0.5, 12.0
"""A row's mean weight off by a factor of 1.65, and that many spreads: weights have fat tails."""


class Importance:
    name = "importance"

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        rows = evidence.rows
        if rows.empty:
            return
        with np.errstate(divide="ignore", invalid="ignore"):
            rows = rows.assign(log=np.log(rows["importance_mean"].astype(float)))
        # Rows that the running policy did not make are far from it for a good reason, and have no age.
        rows = rows[np.isfinite(rows["log"]) & (rows["loss_tokens"] > 0) & rows["from_live_policy"]]
        by_age = rows.groupby("staleness")["capped_share"].agg(["mean", "size"])
        by_age = by_age[by_age["size"] >= _LEAST_ROWS]
        if len(by_age) > 1:
            fresh = float(by_age["mean"].iloc[0])
            worst = int(by_age["mean"].idxmax())
            share = float(by_age["mean"].max())
            if worst != by_age.index[0] and share >= _CAPPED and share >= _CAPPED_TIMES * max(fresh, 0.005):
                yield evidence.finding(
                    self.name,
                    "warning",
                    0.8,
                    f"rows of staleness {worst} have {share:.0%} of their importance weights capped",
                    f"{fresh:.1%} at staleness {by_age.index[0]}: the policy moves too far in {worst} updates for "
                    "this bound. Lower max_staleness or the learning rate",
                    rows[rows["staleness"] == worst].sort_values("capped_share", ascending=False),
                )
        if len(rows) < _LEAST_ROWS:
            return
        middle, sd = float(rows["log"].median()), spread(rows["log"].to_numpy())
        wild = rows[(rows["log"] - middle).abs() > max(_ROW_LOG, _ROW_SPREADS * sd)]
        if len(wild):
            row = most(wild, (wild["log"] - middle).abs())
            yield evidence.finding(
                self.name,
                "warning",
                0.7,
                f"{len(wild)} row(s) whose importance weight stands apart, up to {row.importance_mean:.3g}",
                f"{row.group_id} member {row.member} on engine {row.engine_id}, staleness {row.staleness}; the median "
                f"row's is {np.exp(middle):.3f}. The policy of its label can hardly have sampled its tokens",
                wild.sort_values("log", key=lambda s: -(s - middle).abs()),
            )
