"""Ship-side gate: generation runs freely, assembled batches are parked until the trainer is close enough.

Source: PrimeIntellect-ai/prime-rl, src/prime_rl/orchestrator/scheduler.py (`update_policy`, the barrier at
max_async_level) and dispatcher.py (`dispatch_allowed`): batch k is assembled only once version k - S is there, and
while the orchestrator waits nothing new is dispatched. What is in flight is not counted, so ages have no bound.
Simplified: prime-rl also cancels rollouts past max_off_policy_steps, another knob; here nothing is cancelled.
"""

from __future__ import annotations

from roadstead.benchmarks.simulator.policies.base import Group, QueuePolicy


class ShipSideGate(QueuePolicy):
    name = "ship_side_gate"
    strict = False
    discards = False

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        super().__init__(batch_size, max_staleness)
        self._finished = 0

    def quota(self) -> int:
        parked = self._finished // self.batch_size > self.version + self.max_staleness
        return self.counted if parked else self.counted + 1

    def finish(self, group: Group) -> None:
        super().finish(group)
        self._finished += 1
