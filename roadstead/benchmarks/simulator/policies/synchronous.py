"""Synchronous: generate a batch, train it, publish, begin again. S is ignored; every age is 0.

The baseline that every asynchronous system is measured against; generation and training take turns.
"""

from __future__ import annotations

from roadstead.benchmarks.simulator.policies.base import QueuePolicy


class Synchronous(QueuePolicy):
    name = "synchronous"
    strict = True
    discards = False

    def quota(self) -> int:
        return (self.version + 1) * self.batch_size
