"""Concurrency scaled with S, and a drop at the consumer (TRL).

Source: huggingface/trl, trl/experimental/async_grpo/async_grpo_config.py (`max_inflight_tasks` defaults to
max_staleness times the responses of a batch; `queue_maxsize` 1024 samples) and async_grpo_trainer.py
(`RolloutQueueDataset`: first in first out, a sample older than max_staleness is dropped and the next pulled).
A group's version is the one at its first dispatch, as there. S = 0 admits nothing in TRL (TRL #5656): refused here.
Simplified: the data loader prefetches nothing; a full queue stops admission and not the scorer.
"""

from __future__ import annotations

from roadstead.benchmarks.simulator.policies.base import Group, QueuePolicy

_QUEUE_SAMPLES = 1024
"""TRL's default `queue_maxsize`."""


class Trl(QueuePolicy):
    name = "trl"
    strict = True
    discards = True

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        super().__init__(batch_size, max_staleness)
        if max_staleness < 1:
            raise ValueError(f"max_staleness: {max_staleness} makes trl admit nothing (TRL #5656); use 1 or more")
        self._in_flight = 0
        self._queued = 0

    def quota(self) -> int:
        room = self._in_flight < self.max_staleness * self.batch_size and self._queued < _QUEUE_SAMPLES
        return self.counted + 1 if room else self.counted

    def admit(self, group: Group) -> bool:
        admitted = super().admit(group)
        self._in_flight += admitted
        return admitted

    def finish(self, group: Group) -> None:
        super().finish(group)
        self._in_flight -= 1
        self._queued += group.size

    def take(self) -> list[Group] | None:
        self.drop_stale_finished()
        self._queued = sum(group.size for group in self.ready)
        batch = super().take()
        self._queued -= sum(group.size for group in batch or ())
        return batch
