"""What became of the groups that the ledger no longer holds.

Owns: the ids of trained and dropped groups, for as long as a retry may still ask. Never touches: held groups.
Invariant: an id is in at most one of the two; memory is bounded by `depth` batches of trained ids and a few times as
many dropped ones, however long the run and however often its groups fail.
A crash leaves: nothing, the history travels in the ledger's dictionary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from roadstead.staleness.slots import Slot

_DROPPED_A_SLOT = 4
"""Dropped ids remembered for each slot of the remembered buffers. Groups that fail one after another without a batch
ever filling would grow the history for ever; four failures in a row of every slot are past what a retry can lag."""


class History:
    def __init__(self, depth: int, slots: int) -> None:
        """depth: how many buffers back to remember; slots: of one buffer."""
        self.depth = depth
        self.slots = slots
        self.batches: dict[int, tuple[str, ...]] = {}
        """Ids of each remembered batch in slot order."""
        self.dropped: OrderedDict[str, int] = OrderedDict()
        """Dropped id -> the first buffer not yet taken when it was dropped, oldest first."""
        self._trained: dict[str, Slot] = {}

    def trained(self, group_id: str) -> Slot | None:
        return self._trained.get(group_id)

    def add_batch(self, buffer: int, group_ids: Sequence[str]) -> None:
        """Remember a batch; forget what is `depth` buffers older."""
        self.batches[buffer] = tuple(group_ids)
        self._trained.update((group_id, Slot(buffer, index)) for index, group_id in enumerate(group_ids))
        for old in [b for b in self.batches if b <= buffer - self.depth]:
            for group_id in self.batches.pop(old):
                del self._trained[group_id]
        for group_id in [g for g, b in self.dropped.items() if b <= buffer - self.depth]:
            del self.dropped[group_id]

    def add_dropped(self, group_id: str, buffer: int) -> None:
        """Remember a dropped group; the oldest is forgotten when there are too many."""
        self.dropped[group_id] = buffer
        if len(self.dropped) > self.depth * self.slots * _DROPPED_A_SLOT:
            self.dropped.popitem(last=False)
