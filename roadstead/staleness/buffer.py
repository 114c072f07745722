"""One buffer: the slots of the batch that trains version `number` -> `number` + 1.

Owns: the slots of one row and which deadlines its Reserved have. Never touches: other rows, the choice of a place.
Invariant: Occupied first, then Empty, then Reserved; `occupied + need` is the batch size. Between `lift` and
`put`/`close` one slot of the Reserved tail is a gap that still counts as Reserved, so that a mover can take exactly
that slot.
A crash leaves: nothing, the row is rebuilt from the ledger's dictionary.

Every operation is O(1) in the number of slots: leaving Occupied or Reserved are replaced by the one next to the
Empty slots, never shifted. For each deadline one integer has bit i set when slot i is Reserved with that deadline,
so "the first Reserved that may go there" is its lowest bit and not a scan.
"""

from __future__ import annotations


class Group:
    """A group that the window holds; `buffer` and `index` are its present place."""

    __slots__ = ("buffer", "deadline", "id", "index", "occupied", "version")

    def __init__(self, group_id: str, version: int, deadline: int) -> None:
        self.id = group_id
        self.version = version
        self.deadline = deadline
        self.buffer = -1
        self.index = -1
        self.occupied = False


class Buffer:
    __slots__ = ("_due", "empty", "latest", "need", "number", "occupied", "slots")

    def __init__(self, number: int, slots: int, batch_size: int) -> None:
        self.number = number
        self.slots: list[Group | None] = [None] * slots
        self.occupied = 0
        self.empty = slots
        self.need = batch_size
        """How many Occupied are missing; 0 is READY."""
        self.latest = -1
        """The latest deadline among the Reserved, -1 without any: whether one may move out is one comparison."""
        self._due: dict[int, int] = {}

    def reserve(self, group: Group) -> None:
        """Reserved takes the last Empty slot."""
        self.put(group, self.widen())

    def widen(self) -> int:
        """Turn the last Empty slot into a gap of the Reserved tail; return its index."""
        self.empty -= 1
        return self.occupied + self.empty

    def put(self, group: Group, gap: int) -> None:
        """Reserved takes the gap."""
        self.slots[gap] = group
        group.buffer, group.index = self.number, gap
        deadline = group.deadline
        self._due[deadline] = self._due.get(deadline, 0) | 1 << gap
        if deadline > self.latest:
            self.latest = deadline

    def lift(self, group: Group) -> int:
        """A Reserved leaves; return the gap."""
        gap, deadline = group.index, group.deadline
        self.slots[gap] = None
        left = self._due[deadline] ^ 1 << gap
        if left:
            self._due[deadline] = left
        else:
            del self._due[deadline]
            if deadline == self.latest:
                self.latest = max(self._due, default=-1)
        return gap

    def close(self, gap: int) -> Group | None:
        """Turn the gap into an Empty slot: the head of the tail fills it. Return that head, None if it was the gap."""
        head = self.slots[self.occupied + self.empty]
        if head is not None:
            self.lift(head)
            self.put(head, gap)
        self.empty += 1
        return head

    def first(self, buffer: int) -> Group:
        """The Reserved in the lowest slot whose deadline allows `buffer`; the caller has seen `latest` allow it."""
        index = min((m & -m).bit_length() - 1 for d, m in self._due.items() if d >= buffer)
        group = self.slots[index]
        assert group is not None
        return group

    def due_before(self, buffer: int) -> list[Group]:
        """The Reserved whose deadline is earlier than `buffer`, in slot order."""
        if not any(deadline < buffer for deadline in self._due):
            return []
        return [group for group in self.reserved() if group.deadline < buffer]

    def reserved(self) -> list[Group]:
        """The Reserved in slot order: `[]` for a batch that is nothing but Occupied."""
        return [group for group in self.slots[self.occupied + self.empty :] if group is not None]

    def occupy(self, group: Group) -> None:
        """Occupied takes the first Empty slot."""
        self.slots[self.occupied] = group
        group.buffer, group.index, group.occupied = self.number, self.occupied, True
        self.occupied += 1
        self.need -= 1
        self.empty -= 1

    def vacate(self, group: Group) -> Group | None:
        """An Occupied leaves; the last Occupied takes its slot. Return that last one, None if it was the leaver."""
        self.occupied -= 1
        self.need += 1
        self.empty += 1
        last = self.slots[self.occupied]
        self.slots[self.occupied] = None
        if last is None or last is group:
            return None
        self.slots[group.index] = last
        last.index = group.index
        return last

    def last_occupied(self) -> Group:
        group = self.slots[self.occupied - 1]
        assert group is not None
        return group
