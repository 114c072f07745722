"""A toy clock on which rules for admission are played against each other: one tick a step, training takes no time.

Owns: the clock, and two rules on it: the admission formula (AReaL's StalenessManager) and the Reserve-Occupy ledger.
Never touches: costs, engines; a rollout lasts a number of ticks.
Invariant: a rule is asked in the same order and latencies are drawn once an admission, so the same seed gives the same
run. Rules that admit alike get the same latencies.

The clock is that of "The RL orchestrator control loop", whose executed figures it gives to the digit (the tests have
them): the formula's bound is exact when all rollouts take the same time, and only then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from roadstead.staleness import Ledger


class Rule(Protocol):
    version: int

    def admit(self, rollout: int) -> bool:
        """Start this rollout now, under `version`?"""

    def finish(self, rollout: int) -> None: ...

    def train(self) -> list[int] | None:
        """The rollouts of the next batch, trained at once (`version` + 1), or None while it is not full."""


class Formula:
    """Admits while accepted + running < (S + version + 1) * B; trains in order of completion."""

    def __init__(self, max_staleness: int, batch_size: int, version: int = 0, accepted: int = 0) -> None:
        """accepted: of the past. A run resumed at version v has v * B; 0 there is the defect that is shown."""
        self.version = version
        self._max_staleness = max_staleness
        self._batch_size = batch_size
        self._admitted = accepted
        self._done: deque[int] = deque()

    def admit(self, rollout: int) -> bool:
        free = self._admitted < (self._max_staleness + self.version + 1) * self._batch_size
        self._admitted += free
        return free

    def finish(self, rollout: int) -> None:
        self._done.append(rollout)

    def train(self) -> list[int] | None:
        if len(self._done) < self._batch_size:
            return None
        self.version += 1
        return [self._done.popleft() for _ in range(self._batch_size)]


class ReserveOccupyRule:
    """The ledger, driven as a run drives it."""

    def __init__(self, max_staleness: int, batch_size: int, version: int = 0) -> None:
        self._ledger = Ledger(batch_size=batch_size, max_staleness=max_staleness, version=version)

    @property
    def version(self) -> int:
        return self._ledger.version

    def admit(self, rollout: int) -> bool:
        return self._ledger.reserve(str(rollout)) is not None

    def finish(self, rollout: int) -> None:
        self._ledger.occupy(str(rollout))

    def train(self) -> list[int] | None:
        batch = self._ledger.take()
        if batch is None:
            return None
        self._ledger.publish(self._ledger.version + 1)
        return [int(rollout) for rollout in batch]


@dataclass(frozen=True)
class Played:
    ages: list[int]
    """Of each trained rollout: version of its batch minus version at admission."""
    admitted: list[int]
    """Rollouts started, a tick."""

    @property
    def max_age(self) -> int:
        return max(self.ages)


def play(
    rule: Rule, *, ticks: int = 60, concurrency: int = 64, latency: tuple[int, int] = (3, 3), seed: int = 0
) -> Played:
    """latency: ticks of a rollout, drawn from low..high-1, or `low` when high <= low."""
    rng = np.random.default_rng(seed)
    low, high = latency
    births: list[int] = []
    running: list[tuple[int, int]] = []
    ages: list[int] = []
    admitted: list[int] = []
    for tick in range(ticks):
        before = len(births)
        while len(running) < concurrency and rule.admit(len(births)):
            lasts = int(rng.integers(low, high)) if high > low else low
            running.append((len(births), tick + lasts))
            births.append(rule.version)
        admitted.append(len(births) - before)
        for rollout, end in running:
            if end <= tick + 1:
                rule.finish(rollout)
        running = [(rollout, end) for rollout, end in running if end > tick + 1]
        while (batch := rule.train()) is not None:
            ages += [rule.version - 1 - births[rollout] for rollout in batch]
    return Played(ages, admitted)
