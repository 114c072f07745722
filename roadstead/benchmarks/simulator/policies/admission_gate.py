"""Admission gate: a count bounds the groups in the system, whatever their order (AReaL).

Source: inclusionAI/AReaL, areal/infra/staleness_manager.py, `StalenessManager.get_capacity`:
    min(C - running, (S + version + 1) * B - (accepted + running))
with all groups accepted. Bounded is the count, not the age: a slow group is trained later than it was counted for.
Simplified: C is the engines' own concurrency, counted in responses; the trainer takes groups in order of completion.
"""

from __future__ import annotations

from roadstead.benchmarks.simulator.policies.base import QueuePolicy


class AdmissionGate(QueuePolicy):
    name = "admission_gate"
    strict = False
    discards = False

    def quota(self) -> int:
        return (self.max_staleness + self.version + 1) * self.batch_size
