"""Reserve-Occupy: the ledger of `roadstead.staleness`, the same object that a run has.

Source: PSRL/StaleFlow, arXiv 2601.12784. Nothing is simplified; over-sampling and step targets are not used.
"""

from __future__ import annotations

from roadstead.benchmarks.simulator.policies.base import Group, Policy
from roadstead.staleness import Ledger


class ReserveOccupy(Policy):
    name = "reserve_occupy"
    strict = True
    discards = False

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        super().__init__(batch_size, max_staleness)
        self.ledger = Ledger(batch_size=batch_size, max_staleness=max_staleness)
        self._held: dict[str, Group] = {}

    def admit(self, group: Group) -> bool:
        group_id = str(group.id)
        if self.ledger.reserve(group_id) is None:
            return False
        self._held[group_id] = group
        return True

    def finish(self, group: Group) -> None:
        if self.ledger.occupy(str(group.id)) is None:
            raise AssertionError(f"group {group.id} finished and has no place; without over-sampling that can't be")

    def take(self) -> list[Group] | None:
        batch = self.ledger.take()
        return None if batch is None else [self._held.pop(group_id) for group_id in batch]

    def publish(self) -> None:
        super().publish()
        self.ledger.publish(self.version)
