"""Which versions are evaluated, and which evaluations are under way.

Owns: that count. Never touches: Temporal, samples. Pure.
Invariant: a version is asked for once; only the current one is, because engines do not go back.
A crash leaves: nothing; both numbers travel with the run's state.
"""

from __future__ import annotations

from collections.abc import Iterable

from roadstead.workflows.messages import EvaluationPlan


class Evaluations:
    def __init__(self, plan: EvaluationPlan | None, target: int, looked_at: int, under_way: Iterable[int]) -> None:
        """target: the run's last version, evaluated whatever the interval. looked_at: the newest version so far."""
        self.plan, self._target = plan, target
        self.looked_at = looked_at
        self.under_way = list(under_way)

    def is_due(self, version: int) -> bool:
        """Not looked at yet, and asked for by the interval or by the end of the run."""
        if self.plan is None or version <= self.looked_at:
            return False
        return version % self.plan.every == 0 or version >= self._target

    def begin(self, version: int) -> None:
        self.looked_at = version
        self.under_way.append(version)

    def end(self, version: int) -> None:
        """Also of one that is not under way: a signal may come twice."""
        if version in self.under_way:
            self.under_way.remove(version)
