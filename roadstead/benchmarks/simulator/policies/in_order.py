"""in_order: a group's batch is fixed when it starts (NeMo-RL).

Source: NVIDIA-NeMo/RL, nemo_rl/algorithms/async_utils/staleness_sampler.py, `InOrderSampler`: batches of prompts are
dispatched while the dispatch index is below trainer version + lookahead; each is stamped with its index, and the
trainer takes the batch whose stamp is its version, once all of it is ready.
Simplified: a batch is dispatched group by group as the engines have room, so its later groups may get a newer version;
NeMo-RL hands the whole batch to the engines at once, which can only make it older.
"""

from __future__ import annotations

from roadstead.benchmarks.simulator.policies.base import Group, Policy


class InOrder(Policy):
    name = "in_order"
    strict = True
    discards = False

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        super().__init__(batch_size, max_staleness)
        self._admitted = 0
        self._batches: dict[int, list[Group]] = {}

    def admit(self, group: Group) -> bool:
        target = self._admitted // self.batch_size
        if target > self.version + self.max_staleness:
            return False
        self._admitted += 1
        self._batches.setdefault(target, []).append(group)
        return True

    def finish(self, group: Group) -> None:
        """The group already is in its batch."""

    def take(self) -> list[Group] | None:
        batch = self._batches.get(self.version, [])
        if len(batch) < self.batch_size or not all(group.finished for group in batch):
            return None
        return self._batches.pop(self.version)
