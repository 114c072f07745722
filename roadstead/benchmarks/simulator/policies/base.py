"""What a staleness rule decides, and what the simulation tells it.

Owns: the interface, and the machinery that most rules share: a quota of groups, and a queue of finished ones.
Never touches: time, engines, costs. Invariant: a policy hands out each group at most once, in a batch or as dropped.

How many responses decode at once is not a policy's business: the simulation asks `admit` only while an engine has a
slot free, so that all rules run on the same engines. A policy that also limits concurrency does so on top.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import ClassVar


@dataclass(slots=True, eq=False)
class Group:
    """One prompt's responses as a policy sees them; `id` counts from 0 in the order of admission."""

    id: int
    size: int
    """Responses."""
    version: int = 0
    """Policy version at admission: no token of the group is older."""
    finished: bool = False
    dropped: bool = False


class Policy(ABC):
    name: ClassVar[str]
    strict: ClassVar[bool]
    """Whether it promises that no token older than max_staleness is trained."""
    discards: ClassVar[bool]
    """Whether it throws generated tokens away."""

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        """batch_size: groups. max_staleness: S, in versions. Raises ValueError when the rule can't run with them."""
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.version = 0
        """Published versions; also the number of the batch that is next for the trainer or in it."""
        self._dropped: list[Group] = []

    @abstractmethod
    def admit(self, group: Group) -> bool:
        """May this group start now, at `self.version`? True admits it. A refused group is offered again later."""

    @abstractmethod
    def finish(self, group: Group) -> None:
        """All responses of an admitted group that was not dropped are there."""

    @abstractmethod
    def take(self) -> list[Group] | None:
        """The batch that trains `version` -> `version` + 1, None while there is none. The trainer is idle."""

    def publish(self) -> None:
        """The batch that was taken is trained and its version public."""
        self.version += 1

    def oldest_trained(self) -> int:
        """Tokens of older versions in the batch being taken are masked; 0 masks none."""
        return 0

    def drop(self, group: Group) -> None:
        """For subclasses: throw a group away, running or finished."""
        group.dropped = True
        self._dropped.append(group)

    def collect_dropped(self) -> list[Group]:
        """The groups dropped since the last call; the simulation aborts those that run."""
        dropped, self._dropped = self._dropped, []
        return dropped


class QueuePolicy(Policy):
    """Admits while fewer than `quota` groups were, those dropped not counted; trains in order of completion."""

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        super().__init__(batch_size, max_staleness)
        self.counted = 0
        """Groups admitted and not dropped, ever: accepted plus running, in AReaL's words."""
        self.ready: deque[Group] = deque()

    @abstractmethod
    def quota(self) -> int:
        """How many groups may have been admitted by now."""

    def admit(self, group: Group) -> bool:
        if self.counted >= self.quota():
            return False
        self.counted += 1
        return True

    def finish(self, group: Group) -> None:
        self.ready.append(group)

    def take(self) -> list[Group] | None:
        if len(self.ready) < self.batch_size:
            return None
        return [self.ready.popleft() for _ in range(self.batch_size)]

    def drop(self, group: Group) -> None:
        super().drop(group)
        self.counted -= 1

    def is_stale(self, group: Group) -> bool:
        """Too old for the next batch."""
        return self.version - group.version > self.max_staleness

    def drop_stale_finished(self) -> None:
        fresh = deque(group for group in self.ready if not self.is_stale(group))
        if len(fresh) < len(self.ready):
            for group in self.ready:
                if self.is_stale(group):
                    self.drop(group)
            self.ready = fresh
