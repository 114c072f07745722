"""Invariant: no loss token is older than the bound, and the columns that say so are true.

Owns: the comparison of version spans with max_staleness. Judged by the spans that the engines reported and the loss
mask, never by the row's own `staleness` column. Rows that the running policy did not make have no age.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from roadstead.storage.audit.checks.base import most
from roadstead.storage.audit.evidence import Evidence
from roadstead.storage.audit.report import Finding


class Bound:
    name = "bound"

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        rows = evidence.rows[evidence.rows["from_live_policy"] & evidence.rows["oldest"].notna()]
        if rows.empty:
            return
        ages = (rows["step"] - rows["oldest"]).astype(int)
        attempts = {e.step: e.commit.attempt for e in evidence.steps if e.commit}
        bounds = np.array([evidence.bound(attempts[int(step)]) for step in rows["step"]])
        over = rows[ages > bounds]
        if len(over):
            worst = most(over, ages[over.index])
            limit = bounds[ages.index.get_loc(worst.name)]
            lying = int((over["staleness"] != ages[over.index]).sum())
            yield evidence.finding(
                self.name,
                "critical",
                1.0,
                f"{len(over)} row(s) hold a loss token older than the bound",
                f"{worst.group_id} member {worst.member} in step {worst.step}: token {worst.oldest_at} was sampled by "
                f"version {int(worst.oldest)}, age {ages[worst.name]}, max_staleness {limit}"
                + (f"; {lying} of them say otherwise in their staleness column" if lying else ""),
                over,
            )
        future = rows[rows["newest"] > rows["step"]]
        if len(future):
            yield evidence.finding(
                self.name,
                "critical",
                1.0,
                f"{len(future)} row(s) hold a token of a version that did not exist yet",
                f"newest version {int(future['newest'].max())} in step {int(future['step'].min())}: no policy of that "
                "step can have sampled it; the engine's version labels are wrong",
                future,
            )
        lying_rows = rows[
            ((rows["head_version"] != rows["oldest"]) | (rows["tail_version"] != rows["newest"]))
            & ~rows.index.isin(over.index)
        ]
        if len(lying_rows):
            row = lying_rows.iloc[0]
            yield evidence.finding(
                self.name,
                "warning",
                1.0,
                f"{len(lying_rows)} row(s) whose head or tail version is not that of their spans",
                f"{row.group_id} member {row.member}: head {row.head_version}, tail {row.tail_version}; its loss "
                f"tokens are of versions {int(row.oldest)} to {int(row.newest)}",
                lying_rows,
            )
