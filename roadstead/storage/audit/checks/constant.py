"""Symptom: groups whose rewards are all equal, step after step: advantages are zero, the loss is zero, nothing learns.

Owns: the search for stretches of steps in which an environment gave every group one reward. Some constant groups are
ordinary (all members right, or all wrong), so a stretch counts when the run's own share of them makes it
incredible.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from roadstead.storage.audit.evidence import Evidence
from roadstead.storage.audit.report import Finding

_INCREDIBLE = 1e-6
"""Chance of the stretch under the share of constant groups elsewhere in the run."""


class ConstantRewards:
    name = "constant-reward"

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        rows = evidence.rows
        if rows.empty:
            return
        rows = rows[~rows["reward_missing"]]
        groups = rows.groupby(["environment", "step", "group_id"])["reward"].agg(["min", "max", "size"]).reset_index()
        groups = groups[groups["size"] > 1]
        groups["constant"] = groups["min"] == groups["max"]
        for environment, own in groups.groupby("environment"):
            by_step = own.groupby("step")["constant"].agg(["sum", "size"]).sort_index()
            for first, last in _stretches(by_step.index.to_numpy(), (by_step["sum"] == by_step["size"]).to_numpy()):
                inside = own[(own["step"] >= first) & (own["step"] <= last)]
                outside = own[(own["step"] < first) | (own["step"] > last)]
                # Laplace's rule: without any group outside it is one half.
                share = (int(outside["constant"].sum()) + 1) / (len(outside) + 2)
                if share ** len(inside) >= _INCREDIBLE:
                    continue
                values = np.unique(inside["min"])
                found = rows[
                    (rows["environment"] == environment) & (rows["step"] >= first) & (rows["step"] <= last)
                ].sort_values(["step", "slot", "member"])
                same = f"all of them the same number, {values[0]:g}" if len(values) == 1 else "group by group"
                yield evidence.finding(
                    self.name,
                    "warning",
                    0.95 if len(values) == 1 else 0.85,
                    f"environment {environment}: reward_std is 0 in 100 % of groups, steps {first} to {last}",
                    f"{len(inside)} groups in a row with constant rewards, {same}; elsewhere {share:.0%} of its groups "
                    "are constant. Every advantage is zero: these rows taught nothing. Either the environment is "
                    "broken, or its prompts are all solved or all hopeless",
                    found,
                )


def _stretches(steps: np.ndarray, flags: np.ndarray) -> Iterator[tuple[int, int]]:
    """(first, last) of each run of consecutive True."""
    begin: int | None = None
    for i, flag in enumerate(flags):
        if flag and begin is None:
            begin = i
        if begin is not None and (not flag or i == len(flags) - 1):
            end = i if flag else i - 1
            yield int(steps[begin]), int(steps[end])
            begin = None
