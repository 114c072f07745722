"""Consumer-side drop with a fixed number of warm-up batches (verl).

Source: verl-project/verl, verl/trainer/ppo/v1/trainer_separate_async.py (`num_warmup_batches` batches are added at
the start, one more at each step) and replay_buffer.py (strategy "drop": finished prompts that are too old are evicted
and as many fresh ones sent; of the rest, the oldest are trained). The threshold is aligned so that age S is trained.
Simplified: a prompt's version is the one at which an engine starts it; verl counts from when it is queued, which drops
more. Prompts are evicted when the trainer looks, running ones are not aborted, as in verl.
"""

from __future__ import annotations

from collections import deque

from roadstead.benchmarks.simulator.policies.base import Group, QueuePolicy

_WARMUP_BATCHES = 1
"""verl's default, and what the post holds fixed."""


class VerlDrop(QueuePolicy):
    name = "verl_drop"
    strict = True
    discards = True

    def quota(self) -> int:
        return (_WARMUP_BATCHES + self.version + 1) * self.batch_size

    def take(self) -> list[Group] | None:
        self.drop_stale_finished()
        if len(self.ready) >= self.batch_size:
            self.ready = deque(sorted(self.ready, key=lambda group: group.version))
        return super().take()
