"""The window: which group stands in which slot of the buffers that are not taken yet.

Owns: the arrangement, and every rule by which a group gets, keeps or loses a place. Never touches: policy versions,
group ids already ended, serialisation; those are the ledger's.
Invariants, after every operation:
  legal    a group stands in a row that is not later than its deadline;
  packed   no Reserved has an Empty slot in a row after its own and not after its deadline;
  forward  no row that still wants Occupied has an Empty slot while a later row holds an Occupied.
A crash leaves: nothing, the window is rebuilt from the ledger's dictionary.

What `packed` buys: let e be the earliest row with an Empty slot. The rows before e are full, and their Reserved all
have deadlines before e. Nobody in them can leave, so no finished or new group can be placed before e without
costing a Reserved its place, whatever chain of moves is tried; and e itself is free. Hence one look at the counts
of the rows answers what a search over all assignments would.

Cost: an operation looks at each of the max_staleness + 1 rows a few times, and moves at most one group a row.
"""

from __future__ import annotations

from collections.abc import Iterator

from roadstead.staleness.buffer import Buffer, Group

Step = tuple[str, int, int, int, int]
"""A move as (group id, old row, old index, new row, new index): plain, because most are made and never reported."""


class Window:
    def __init__(self, first: int, end: int, batch_size: int, slots: int) -> None:
        """Rows first..end-1, all Empty; a row is READY at batch_size Occupied and has `slots` slots."""
        self.first = first
        self.batch_size = batch_size
        self.slots = slots
        self.surplus: list[Group] = []
        """Reserved that no row could use any more, dropped since the owner last emptied this list."""
        self._rows: list[Buffer] = []
        self.extend(end)

    @property
    def end(self) -> int:
        return self.first + len(self._rows)

    @property
    def rows(self) -> tuple[Buffer, ...]:
        return tuple(self._rows)

    def extend(self, end: int) -> None:
        while self.end < end:
            self._rows.append(Buffer(self.end, self.slots, self.batch_size))

    def groups(self) -> Iterator[Group]:
        """All held groups by row and slot."""
        return (group for row in self._rows for group in row.slots if group is not None)

    def capacity(self) -> int:
        """How many groups with the latest deadline `admit` would take one after another."""
        wanting = (i for i, row in enumerate(self._rows) if row.empty and row.need)
        start = next(wanting, len(self._rows))
        return sum(row.empty for row in self._rows[start:])

    def admit(self, group: Group) -> bool:
        """Reserve a place for a new group; False when none is free or none is wanted.

        An Empty slot of a READY row is no reason to generate more: with nothing else free, nobody would train it.
        """
        rows = self._until(group.deadline)
        return any(row.empty and row.need for row in rows) and self._reserve(group, rows)

    def occupy(self, group: Group) -> bool:
        """Place a finished Reserved in the earliest row that costs no Reserved its place; False: it is surplus."""
        moves: list[Step] = []
        row = self._row(group)
        self._refill(row, row.lift(group), moves)
        rows = self._until(group.deadline)
        target = self._earliest(rows) or self._completed(rows)
        if target is None:
            return False
        if not target.empty:
            self._displace(target)
        target.occupy(group)
        if self.slots > self.batch_size:
            self._drop_surplus()
        return True

    def remove(self, group: Group) -> list[Step]:
        """Drop a held group; Reserved move later into the place it frees, then Occupied move forward."""
        moves: list[Step] = []
        row = self._row(group)
        if group.occupied:
            last = row.vacate(group)
            if last is not None:
                moves.append((last.id, row.number, row.occupied, row.number, last.index))
        else:
            row = self._refill(row, row.lift(group), moves)
        self._settle(row, moves)
        self._drop_surplus()
        return moves

    def lower(self, group: Group, version: int, deadline: int) -> bool:
        """Give a held group an older version; False when that leaves it no place, and it is dropped.

        A Reserved moves to an earlier row if it must. An Occupied only stays: `forward` says that the rows before it
        have no Empty slot that is wanted, and Occupied are never moved later to make one.
        """
        stays = group.buffer <= deadline
        if group.occupied:
            if stays:
                group.version, group.deadline = version, deadline
            else:
                self.remove(group)
            return stays
        moves: list[Step] = []
        row = self._row(group)
        gap = row.lift(group)
        group.version, group.deadline = version, deadline
        if stays:
            row.put(group, gap)
        else:
            row = self._refill(row, gap, moves)
            stays = self._reserve(group, self._until(deadline))
            self._settle(row, moves)
        self._drop_surplus()
        return stays and group not in self.surplus

    def advance(self) -> list[Group]:
        """Hand out the Occupied of the first row and leave it; its Reserved, if any, have no later place: `packed`."""
        row = self._rows.pop(0)
        self.first += 1
        self.surplus += row.reserved()
        return [group for group in row.slots[: row.occupied] if group is not None]

    def _row(self, group: Group) -> Buffer:
        return self._rows[group.buffer - self.first]

    def _until(self, deadline: int) -> list[Buffer]:
        return self._rows[: max(0, deadline + 1 - self.first)]

    def _reserve(self, group: Group, rows: list[Buffer]) -> bool:
        """Reserve the latest of these rows that has an Empty slot; False when none has."""
        for row in reversed(rows):
            if row.empty:
                row.reserve(group)
                return True
        return False

    def _earliest(self, rows: list[Buffer]) -> Buffer | None:
        """The first row that wants Occupied, from the first Empty slot on."""
        free = False
        for row in rows:
            free = free or row.empty > 0
            if free and row.need:
                return row
        return None

    def _completed(self, rows: list[Buffer]) -> Buffer | None:
        """Over-sampling only: the first row that wants Occupied, if one more makes it READY and that frees a slot.

        All slots up to this row are held, but once it is READY some Reserved are surplus: drop the first of them rather
        than a group that is finished.
        """
        target = next((row for row in rows if row.need), None)
        if target is None or target.need > 1:
            return None
        surplus = self._useless(completed=target)
        if not surplus:
            return None
        self._drop(surplus[0])
        return target

    def _displace(self, row: Buffer) -> None:
        """Over-sampling only: the first Reserved of a full row goes to the latest Empty slot before it."""
        group = row.slots[row.occupied]
        assert group is not None
        row.close(row.lift(group))
        for earlier in reversed(self._rows[: row.number - self.first]):
            if earlier.empty:
                earlier.reserve(group)
                return
        raise AssertionError(f"no Empty slot before buffer {row.number}, so it was not a place to choose")

    def _refill(self, row: Buffer, gap: int, moves: list[Step]) -> Buffer:
        """Move the first earlier Reserved that may go there into the gap, another into the gap that leaves, and so on.

        Returns the row that ends with one more Empty slot. "First" is by row, then slot. Only a row with a later
        deadline than all rows before it can ever be the first, hence one pass up collects the candidates and one
        pass down uses them.
        """
        candidates: list[Buffer] = []
        reach = -1
        for earlier in self._rows[: row.number - self.first]:
            if earlier.latest > reach:
                reach = earlier.latest
                candidates.append(earlier)
        while candidates and candidates[-1].latest >= row.number:
            source = candidates.pop()
            while candidates and candidates[-1].latest >= row.number:
                source = candidates.pop()
            group = source.first(row.number)
            left = source.lift(group)
            row.put(group, gap)
            moves.append((group.id, source.number, left, row.number, gap))
            row, gap = source, left
        head = row.occupied + row.empty
        moved = row.close(gap)
        if moved is not None:
            moves.append((moved.id, row.number, head, row.number, gap))
        return row

    def _pull(self, row: Buffer, moves: list[Step]) -> Buffer:
        """Fill an Empty slot with the last Occupied of the next row that has any, then the slot that frees, and so on.

        Returns the row where the Empty slot ended. Earlier is always legal.
        """
        while row.empty and row.need:
            for source in self._rows[row.number + 1 - self.first :]:
                if source.occupied:
                    break
            else:
                break
            group = source.last_occupied()
            source.vacate(group)
            left = group.index
            row.occupy(group)
            moves.append((group.id, source.number, left, row.number, group.index))
            row = source
        return row

    def _settle(self, row: Buffer, moves: list[Step]) -> None:
        """Restore `forward`, then `packed`, after `row` got an Empty slot, unless that is taken again.

        One pass is enough: a Reserved that could stand in the row of a later Occupied is in a READY row (else the
        Occupied would have its place), so what the second half moves leaves Empty slots that want no Occupied.
        """
        if row.empty:
            row = self._pull(row, moves)
            self._refill(row, row.widen(), moves)

    def _drop_surplus(self) -> None:
        """Drop the Reserved for which every row up to their deadline is READY."""
        for group in self._useless():
            self._drop(group)

    def _useless(self, completed: Buffer | None = None) -> list[Group]:
        """The Reserved whose deadline is before the first row that wants Occupied, taking `completed` for READY."""
        if self.slots == self.batch_size:
            return []
        wanting = next((row.number for row in self._rows if row.need and row is not completed), None)
        if wanting is None:
            return [group for row in self._rows for group in row.reserved()]
        return [group for row in self._rows[: wanting - self.first] for group in row.due_before(wanting)]

    def _drop(self, group: Group) -> None:
        row = self._row(group)
        self._refill(row, row.lift(group), [])
        self.surplus.append(group)
