"""Symptom: the same response more often than chance allows.

Owns: the comparison of responses by token ids. How likely a repetition is, the engine itself said: a response of total
logprob L comes again with chance exp(L). Short, sure answers repeat all the time and are not counted; a long one that
repeats was copied (one seed for all members, a cached answer, a replayed request).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from roadstead.storage.audit.evidence import Evidence
from roadstead.storage.audit.report import Finding

_INCREDIBLE = float(np.log(1e-6))
"""Chance of one such pair among all pairs of the run."""


class Duplicates:
    name = "duplicates"

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        rows = evidence.rows
        if rows.empty:
            return
        rows = rows[rows["from_live_policy"]]  # a prompt that brings trajectories brings them in every epoch
        # The same trajectory in two steps is another check's finding.
        own = rows.drop_duplicates(["group_id", "member"])
        pairs = max(1.0, len(own) * (len(own) - 1) / 2)
        unlikely = own[own["behavior_sum"] + np.log(pairs) < _INCREDIBLE]
        count = unlikely.groupby("text")["text"].transform("size")
        found = unlikely[count > 1].sort_values(["text", "step", "slot", "member"])
        if len(found):
            chance = found["behavior_sum"].max() / np.log(10)
            texts = found["text"].nunique()
            within = found.groupby("text")["group_id"].nunique().max() == 1
            yield evidence.finding(
                self.name,
                "warning",
                0.95,
                f"{texts} response(s) occur more than once, in {len(found)} rows",
                f"{'within one group each' if within else 'across groups'}; by the engine's own logprobs the likeliest "
                f"of them comes again with chance 1e{chance:.0f}. Members that share a seed, or answers served from a "
                "cache",
                found,
            )
