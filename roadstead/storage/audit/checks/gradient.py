"""Symptom: a gradient norm far above those of the steps before, and the rows with the largest part in the loss.

Owns: the comparison of a step's norm with the twenty before it. It is an effect: what caused it, the other checks say.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from roadstead.storage.audit.evidence import Evidence
from roadstead.storage.audit.report import Finding

_TIMES = 10.0
"""Over the median of the steps before: norms scatter by a factor of 2 or 3 from batch to batch."""
_BEFORE = 20
_LEAST = 5


class GradientNorm:
    name = "gradient-norm"

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        norms = {e.step: e.record.metrics.grad_norm for e in evidence.steps if e.record}
        known = [(step, norm) for step, norm in norms.items() if norm is not None]
        for i, (step, norm) in enumerate(known):
            before = [n for _, n in known[max(0, i - _BEFORE) : i]]
            if len(before) < _LEAST or norm <= _TIMES * float(np.median(before)):
                continue
            rows = evidence.rows[evidence.rows["step"] == step].sort_values("loss", key=lambda s: -s.abs())
            yield evidence.finding(
                self.name,
                "note",
                0.7,
                f"step {step}: gradient norm {norm:.3g}, {norm / float(np.median(before)):.0f} times the usual",
                f"median of the {len(before)} steps before: {float(np.median(before)):.3g}. The rows named have the "
                "largest parts in the loss; `roadstead bisect` finds those whose removal cures it",
                rows.head(8),
                first_step=step,
            )
            return  # what follows a spike is its echo
