"""Oldest first, and wait for what would become too old: bounded ages without a ledger and without drops, nearly.

Source: verl-project/verl, verl/trainer/ppo/v1/replay_buffer.py, strategy "wait": no batch while a prompt that has
reached the threshold still runs; then the oldest finished ones. alibaba/ROLL's ReplayBuffer.get_batch (RLVR pipeline,
no additional prompts) waits in the same way. Admission as in the admission gate: (S + version + 1) batches.
The bound is not kept in every schedule: a batch filled with young groups while two batches' worth of groups of the
same older version still run leaves more of them than the next batch holds. Reserve-Occupy looks ahead to that.
Simplified: verl's warm-up batches are set to S.
"""

from __future__ import annotations

from collections import Counter, deque

from roadstead.benchmarks.simulator.policies.base import Group, QueuePolicy


class VerlWait(QueuePolicy):
    name = "verl_wait"
    strict = False
    discards = False

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        super().__init__(batch_size, max_staleness)
        self._running: Counter[int] = Counter()
        """Running groups by version."""

    def quota(self) -> int:
        return (self.max_staleness + self.version + 1) * self.batch_size

    def admit(self, group: Group) -> bool:
        admitted = super().admit(group)
        if admitted:
            self._running[self.version] += 1
        return admitted

    def finish(self, group: Group) -> None:
        super().finish(group)
        self._running[group.version] -= 1
        if not self._running[group.version]:
            del self._running[group.version]

    def take(self) -> list[Group] | None:
        if len(self.ready) < self.batch_size:
            return None
        if self._running and self.version - min(self._running) >= self.max_staleness:
            return None
        self.ready = deque(sorted(self.ready, key=lambda group: group.version))
        return super().take()
