"""Drop, and abort in flight what can no longer be trained (ROLL).

Source: alibaba/ROLL, roll/distributed/scheduler/generate_scheduler.py, `ReplayBuffer`: async_generation_ratio + 1
batches ahead (`advance_step`), an aborted prompt gives its place back, oldest start step first, and `gc` ends every
prompt whose start step would be too old at the next step, running or finished. The ratio is S.
Simplified, after the post's description of ROLL: `get_batch` there waits for older running prompts before it takes
younger ones, so that without additional prompts `gc` finds little to abort (that variant is verl_wait). Here a batch is
taken as soon as enough groups are finished, and `gc` aborts the rest.
"""

from __future__ import annotations

from collections import deque

from roadstead.benchmarks.simulator.policies.base import Group, QueuePolicy


class Roll(QueuePolicy):
    name = "roll"
    strict = True
    discards = True

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        super().__init__(batch_size, max_staleness)
        self._running: dict[int, Group] = {}

    def quota(self) -> int:
        return (self.max_staleness + self.version + 1) * self.batch_size

    def admit(self, group: Group) -> bool:
        admitted = super().admit(group)
        if admitted:
            self._running[group.id] = group
        return admitted

    def finish(self, group: Group) -> None:
        super().finish(group)
        del self._running[group.id]

    def take(self) -> list[Group] | None:
        if len(self.ready) >= self.batch_size:
            self.ready = deque(sorted(self.ready, key=lambda group: group.version))
        return super().take()

    def publish(self) -> None:
        super().publish()
        self.drop_stale_finished()
        for group in [group for group in self._running.values() if self.is_stale(group)]:
            del self._running[group.id]
            self.drop(group)
