"""How the tests look at a ledger: drawn tables, the rules every table must obey, and a search over all assignments.

Owns: reading a ledger through its public surface. Never touches: its inside.
"""

from __future__ import annotations

from roadstead.staleness import BufferState, GroupState, Ledger, SlotState


def draw(ledger: Ledger, buffer: int) -> str:
    """One buffer in slot order: Occupied as they are named (capital), Reserved in small letters, Empty a dot."""
    return " ".join(
        "." if group_id is None else group_id.lower() if state is SlotState.RESERVED else group_id
        for state, group_id in ledger.slots(buffer)
    )


def table(ledger: Ledger) -> list[str]:
    """All buffers of the window, from the next one for the trainer on."""
    return [draw(ledger, buffer) for buffer in ledger.buffers]


def held(ledger: Ledger, state: SlotState) -> dict[str, int]:
    """Group id -> buffer of all groups in this state, by buffer and slot."""
    return {
        group_id: buffer
        for buffer in ledger.buffers
        for slot_state, group_id in ledger.slots(buffer)
        if slot_state is state and group_id is not None
    }


def deadline(ledger: Ledger, group_id: str) -> int:
    return ledger.version_of(group_id) + ledger.max_staleness


def check(ledger: Ledger) -> None:
    """Every rule that a table must obey at any time."""
    letters = {SlotState.OCCUPIED: "O", SlotState.EMPTY: "E", SlotState.RESERVED: "R"}
    seen: list[str] = []
    for buffer in ledger.buffers:
        row = ledger.slots(buffer)
        order = "".join(letters[state] for state, _ in row)
        occupied, empty = order.count("O"), order.count("E")
        assert len(row) == ledger.slots_per_buffer
        assert order == "O" * occupied + "E" * empty + "R" * (len(row) - occupied - empty), f"{buffer}: {order}"
        assert occupied <= ledger.batch_size
        expected = (
            BufferState.READY if occupied == ledger.batch_size else BufferState.PENDING if empty else BufferState.STUCK
        )
        assert ledger.state(buffer) is expected
        for index, (state, group_id) in enumerate(row):
            if group_id is None:
                continue
            seen.append(group_id)
            assert buffer <= deadline(ledger, group_id), f"{group_id} is beyond the bound in {buffer}"
            place = ledger.where(group_id)
            assert place is not None and (place.buffer, place.index) == (buffer, index)
            wanted = GroupState.OCCUPIED if state is SlotState.OCCUPIED else GroupState.RESERVED
            assert ledger.group_state(group_id) is wanted
    assert len(seen) == len(set(seen)), "a group stands twice"
    assert ledger.in_flight == len(held(ledger, SlotState.RESERVED))
    assert ledger.occupied == len(held(ledger, SlotState.OCCUPIED))
    assert ledger.taken in (ledger.version, ledger.version + 1)
    end = ledger.version + ledger.max_staleness + 1
    target = end if ledger.step_target is None else ledger.step_target
    assert ledger.buffers.stop == max(ledger.taken, min(end, target))
    _check_placement(ledger)


def _check_placement(ledger: Ledger) -> None:
    """Reserved as late as possible, Occupied as early as possible, nobody kept whom no buffer can use."""
    free = [b for b in ledger.buffers if SlotState.EMPTY in [state for state, _ in ledger.slots(b)]]
    wanting = [b for b in ledger.buffers if ledger.state(b) is not BufferState.READY]
    for group_id, buffer in held(ledger, SlotState.RESERVED).items():
        last = deadline(ledger, group_id)
        assert not [b for b in free if buffer < b <= last], f"{group_id} could stand later than {buffer}"
        assert [b for b in wanting if b <= last], f"{group_id} is surplus"
        # This is why one pull and one refill settle a table.
        if buffer in wanting:
            later = [b for b in held(ledger, SlotState.OCCUPIED).values() if buffer < b <= last]
            assert not later, f"{group_id} could change places with an Occupied of {later}"
    for group_id, buffer in held(ledger, SlotState.OCCUPIED).items():
        assert not [b for b in free if b in wanting and b < buffer], f"{group_id} could stand earlier than {buffer}"


def room(ledger: Ledger) -> dict[int, int]:
    """Slots of each buffer that no Occupied holds."""
    return {b: sum(state is not SlotState.OCCUPIED for state, _ in ledger.slots(b)) for b in ledger.buffers}


def reserved_deadlines(ledger: Ledger) -> dict[str, int]:
    return {group_id: deadline(ledger, group_id) for group_id in held(ledger, SlotState.RESERVED)}


def assignable(room: dict[int, int], deadlines: list[int]) -> bool:
    """Try every assignment of Reserved with these deadlines to slots: does one give each a legal slot?"""
    if not deadlines:
        return True
    *others, last = deadlines
    for buffer, slots in room.items():
        if slots and buffer <= last and assignable({**room, buffer: slots - 1}, others):
            return True
    return False


def earliest_by_search(ledger: Ledger, group_id: str) -> int | None:
    """The buffer that `occupy` must choose for a Reserved, found by trying all of them; None: the group is surplus."""
    others = reserved_deadlines(ledger)
    last = others.pop(group_id)
    free = room(ledger)
    wanting = [b for b in ledger.buffers if ledger.state(b) is not BufferState.READY]
    for buffer in wanting:
        if buffer <= last and free[buffer] and _fits(free, buffer, list(others.values())):
            return buffer
    # Over-sampling: a group that makes the first wanting buffer READY turns Reserved there into surplus.
    if wanting and wanting[0] <= last:
        first, following = wanting[0], wanting[1] if len(wanting) > 1 else None
        missing = ledger.batch_size - sum(s is SlotState.OCCUPIED for s, _ in ledger.slots(first))
        useful = [d for d in others.values() if following is not None and d >= following]
        if missing == 1 and _fits(free, first, useful):
            return first
    return None


def _fits(free: dict[int, int], buffer: int, deadlines: list[int]) -> bool:
    return assignable({**free, buffer: free[buffer] - 1}, deadlines)
