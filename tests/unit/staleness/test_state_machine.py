"""Any sequence of calls: no rule is ever broken, and every choice equals a search over all assignments."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from roadstead.staleness import BufferState, GroupState, Ledger, SlotState

from .tables import assignable, check, deadline, draw, earliest_by_search, held, reserved_deadlines, room

FEW_ENOUGH_TO_SEARCH = 7


class Calls(RuleBasedStateMachine):
    """Calls the ledger with everything that a workflow may, and keeps its own book of what was admitted and ended."""

    @initialize(
        max_staleness=st.integers(0, 6),
        batch_size=st.integers(1, 8),
        extra=st.sampled_from([0, 0, 0, 1, 2, 3]),
        version=st.integers(0, 3),
    )
    def start(self, max_staleness: int, batch_size: int, extra: int, version: int) -> None:
        self.extra = extra
        self.ledger = Ledger(
            batch_size=batch_size,
            max_staleness=max_staleness,
            slots_per_buffer=batch_size + extra,
            version=version,
        )
        self.admitted = 0
        self.version: dict[str, int] = {}
        self.trained: list[str] = []
        self.dropped: set[str] = set()
        self.next_batch = version

    def reserved(self) -> dict[str, int]:
        return held(self.ledger, SlotState.RESERVED)

    def pick(self, data: st.DataObject, state: SlotState) -> str:
        return data.draw(st.sampled_from(list(held(self.ledger, state))), label=str(state))

    def searchable(self) -> bool:
        return self.ledger.in_flight <= FEW_ENOUGH_TO_SEARCH

    def drop(self, *group_ids: str) -> None:
        for group_id in group_ids:
            assert group_id not in self.dropped and group_id not in self.trained
            assert self.ledger.group_state(group_id) is GroupState.DROPPED
        self.dropped.update(group_ids)

    def drop_surplus(self) -> None:
        surplus = self.ledger.collect_surplus()
        assert not surplus or self.extra, "without over-sampling nothing is surplus"
        self.drop(*surplus)

    def snapshot(self) -> dict[str, Any]:
        return self.ledger.to_dict()

    @rule(count=st.integers(1, 8), lag=st.sampled_from([0, 0, 0, 1, 2, -1]))
    def reserve(self, count: int, lag: int) -> None:
        ledger = self.ledger
        for _ in range(count):
            group_id = f"g{self.admitted}"
            version = ledger.version - lag
            admitted = min(version, ledger.version)
            last = admitted + ledger.max_staleness
            deadlines = [*reserved_deadlines(ledger).values(), last]
            capacity = ledger.capacity()
            free = [b for b in ledger.buffers if b <= last and SlotState.EMPTY in dict(ledger.slots(b))]
            slot = ledger.reserve(group_id, None if lag == 0 else version)
            if lag <= 0:
                assert (slot is not None) == (capacity > 0)
                assert ledger.capacity() == max(0, capacity - 1)
            if not self.extra and self.searchable():
                assert (slot is not None) == assignable(room(ledger), deadlines)
            if slot is None:
                assert self.extra or not free
                return
            assert slot.buffer == max(free), "not the latest legal buffer"
            assert slot.index == max(i for i in range(slot.index + 1) if self.is_reserved(slot.buffer, i))
            self.admitted += 1
            self.version[group_id] = admitted

    def is_reserved(self, buffer: int, index: int) -> bool:
        return self.ledger.slots(buffer)[index][0] is SlotState.RESERVED

    @precondition(lambda self: self.ledger.in_flight)
    @rule(data=st.data(), count=st.integers(1, 6))
    def occupy(self, data: st.DataObject, count: int) -> None:
        ledger = self.ledger
        for _ in range(min(count, ledger.in_flight)):
            group_id = self.pick(data, SlotState.RESERVED)
            before = ledger.where(group_id)
            assert before is not None
            was_ready = ledger.state(before.buffer) is BufferState.READY
            searchable = self.searchable()
            expected = earliest_by_search(ledger, group_id) if searchable else None
            slot = ledger.occupy(group_id)
            if slot is None:
                assert self.extra and (expected is None)
                self.drop(group_id)
            else:
                if searchable:
                    assert slot.buffer == expected, "not the earliest safe buffer"
                assert was_ready or slot <= before, "later than the reserved place"
                assert ledger.slots(slot.buffer)[slot.index] == (SlotState.OCCUPIED, group_id)
            self.drop_surplus()
            if not ledger.in_flight:
                break

    @precondition(lambda self: self.ledger.in_flight)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self.remove(self.pick(data, SlotState.RESERVED), self.ledger.discard)

    @precondition(lambda self: self.ledger.occupied)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self.remove(self.pick(data, SlotState.OCCUPIED), self.ledger.evict)

    def remove(self, group_id: str, call: Any) -> None:
        places = {g: self.ledger.where(g) for g in self.version if self.live(g)}
        moves = call(group_id)
        self.drop(group_id)
        self.drop_surplus()
        if self.extra:
            return
        del places[group_id]
        for move in moves:
            assert places[move.group_id] == move.source
            places[move.group_id] = move.target
        assert places == {g: self.ledger.where(g) for g in places}, "the moves do not tell what changed"

    def live(self, group_id: str) -> bool:
        return group_id not in self.dropped and group_id not in self.trained

    @precondition(lambda self: self.ledger.in_flight + self.ledger.occupied)
    @rule(data=st.data(), by=st.integers(-1, 3), state=st.sampled_from([SlotState.RESERVED, SlotState.OCCUPIED]))
    def lower(self, data: st.DataObject, by: int, state: SlotState) -> None:
        ledger = self.ledger
        if not held(ledger, state):
            return
        group_id = self.pick(data, state)
        before, old = ledger.where(group_id), ledger.version_of(group_id)
        assert before is not None
        last = old - by + ledger.max_staleness
        deadlines = {**reserved_deadlines(ledger), group_id: last}
        possible = before.buffer <= last if state is SlotState.OCCUPIED else None
        if state is SlotState.RESERVED and not self.extra and self.searchable():
            possible = by <= 0 or assignable(room(ledger), list(deadlines.values()))
        slot = ledger.lower(group_id, old - by)
        if by <= 0:
            assert slot == before and ledger.version_of(group_id) == old
            return
        assert possible is None or self.extra or possible == (slot is not None)
        if slot is None:
            self.drop(group_id)
        else:
            assert slot.buffer <= before.buffer
            assert ledger.version_of(group_id) == old - by
            self.version[group_id] = old - by
        self.drop_surplus()

    @rule()
    def take_and_publish(self) -> None:
        ledger = self.ledger
        if ledger.taken == ledger.version + 1:
            assert ledger.take() is None, "a second batch before the first was published"
            ledger.publish(ledger.version + 1)
            return
        ready = len(ledger.buffers) > 0 and ledger.state(ledger.taken) is BufferState.READY
        leftover = self.reserved() if ready else {}
        last = {g: deadline(ledger, g) for g in leftover}
        batch = ledger.take()
        assert (batch is not None) == ready
        if batch is None:
            return
        assert len(batch) == ledger.batch_size
        assert ledger.batch(self.next_batch) == batch
        for group_id in batch:
            assert self.live(group_id), "trained twice, or after it was dropped"
            age = self.next_batch - self.version[group_id]
            assert 0 <= age <= ledger.max_staleness, "the bound is exceeded"
            assert ledger.group_state(group_id) is GroupState.TRAINED
        self.trained.extend(batch)
        for group_id in ledger.collect_surplus():
            assert leftover[group_id] == self.next_batch, "only who stood in the taken buffer can lose its place"
            assert not [b for b in ledger.buffers if b <= last[group_id] and "." in draw(ledger, b)]
            self.drop(group_id)
        self.next_batch += 1

    @precondition(lambda self: self.version)
    @rule(data=st.data())
    def retry_everything(self, data: st.DataObject) -> None:
        """Late and repeated calls: answered, and nothing changes."""
        group_id = data.draw(st.sampled_from(sorted(self.version)))
        ledger, before = self.ledger, self.snapshot()
        remembered = self.live(group_id) or group_id in json.dumps([before["batches"], before["dropped"]])
        if not remembered:
            return
        state = ledger.group_state(group_id)
        where = ledger.where(group_id)
        assert ledger.reserve(group_id) == where
        assert ledger.lower(group_id, ledger.version + 1) == where
        if state is not GroupState.RESERVED:
            assert ledger.occupy(group_id) == where
            assert ledger.discard(group_id) == []
        if state is not GroupState.OCCUPIED:
            assert ledger.evict(group_id) == []
        ledger.publish(ledger.version)
        assert self.snapshot() == before

    @rule()
    def continue_elsewhere(self) -> None:
        state = self.snapshot()
        again = Ledger.from_dict(json.loads(json.dumps(state)))
        assert again.to_dict() == state
        self.ledger = again

    @rule()
    def drain_and_think_better_of_it(self) -> None:
        ledger = self.ledger
        before = ledger.in_flight + ledger.occupied
        lost = ledger.set_step_target(ledger.drain_target)
        assert self.extra or not lost
        self.drop(*lost)
        self.drop_surplus()
        check(ledger)
        assert self.extra or ledger.in_flight + ledger.occupied == before
        missing = ledger.batch_size * len(ledger.buffers) - before
        assert self.extra or (0 <= missing < ledger.batch_size and ledger.capacity() == missing)
        self.drop(*ledger.set_step_target(None))
        self.drop_surplus()

    @rule(max_staleness=st.integers(0, 6))
    def change_the_bound(self, max_staleness: int) -> None:
        ledger = self.ledger
        rising = max_staleness >= ledger.max_staleness
        lost = ledger.set_max_staleness(max_staleness)
        assert self.extra or not (rising and lost)
        self.drop(*lost)
        self.drop_surplus()

    @invariant()
    def rules_hold(self) -> None:
        if not hasattr(self, "ledger"):
            return
        check(self.ledger)
        live = {g for g in self.version if self.live(g)}
        assert live == {*held(self.ledger, SlotState.RESERVED), *held(self.ledger, SlotState.OCCUPIED)}
        for group_id in live:
            assert self.ledger.version_of(group_id) == self.version[group_id]


TestCalls = Calls.TestCase
TestCalls.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)
