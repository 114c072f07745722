"""The 36 edge cases of the protocol, one test each, in their order.

Where a case is about the rollout, the store or the clock, the test is the ledger's share of it.
"""

from __future__ import annotations

import json
import random

import pytest

from roadstead.staleness import BufferState, GroupState, Ledger, Move, Slot, SlotState, UnknownGroup

from .tables import check, held, table


def filled(group_ids: str, **shape: int) -> Ledger:
    """A ledger that has admitted these groups in this order."""
    ledger = Ledger(**shape)
    for group_id in group_ids:
        assert ledger.reserve(group_id), group_id
    return ledger


def finish(ledger: Ledger, group_ids: str) -> None:
    for group_id in group_ids:
        assert ledger.occupy(group_id), group_id
        check(ledger)


def restarted(ledger: Ledger) -> Ledger:
    """As after a crash: only the dictionary is left."""
    return Ledger.from_dict(json.loads(json.dumps(ledger.to_dict())))


def test_01_demonstration_batches() -> None:
    ledger = filled("ABCDEF", batch_size=4, max_staleness=1)
    finish(ledger, "A")
    ledger.reserve("G")
    finish(ledger, "D")
    ledger.reserve("H")
    finish(ledger, "CE")
    batches = [ledger.take()]
    finish(ledger, "FG")
    ledger.publish(1)
    for group_id in "IJKL":
        ledger.reserve(group_id)
    finish(ledger, "JHKB")
    batches.append(ledger.take())
    finish(ledger, "LI")
    ledger.publish(2)
    batches.append(ledger.take())
    assert batches == [tuple("ADCE"), tuple("FGHB"), tuple("JKLI")]


def test_02_reserve_falls_back_to_the_tail_of_an_earlier_buffer() -> None:
    ledger = filled("ABCD", batch_size=4, max_staleness=1)
    assert ledger.reserve("E") == Slot(0, 3)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_03_a_full_window_refuses_and_never_raises(max_staleness: int) -> None:
    ledger = Ledger(batch_size=2, max_staleness=max_staleness)
    for index in range((max_staleness + 1) * 2):
        assert ledger.capacity() == (max_staleness + 1) * 2 - index
        assert ledger.reserve(f"g{index}")
    assert ledger.reserve("one more") is None
    assert ledger.capacity() == 0
    with pytest.raises(UnknownGroup):
        ledger.where("one more")


def test_04_without_staleness_one_buffer_at_a_time() -> None:
    ledger = filled("AB", batch_size=2, max_staleness=0)
    finish(ledger, "AB")
    assert ledger.take() == ("A", "B")
    assert (len(ledger.buffers), ledger.reserve("C")) == (0, None)
    ledger.publish(1)
    assert ledger.reserve("C") == Slot(1, 1)


def test_05_the_only_reserved_of_a_stuck_buffer_occupies_its_own_slot() -> None:
    ledger = filled("AB", batch_size=2, max_staleness=0)
    finish(ledger, "A")
    place = ledger.where("B")
    assert ledger.state(0) is BufferState.STUCK
    assert ledger.occupy("B") == place
    assert ledger.state(0) is BufferState.READY


def test_06_an_old_reserved_is_not_moved_beyond_its_bound() -> None:
    ledger = Ledger(batch_size=2, max_staleness=1, version=1)
    ledger.reserve("A", version=0)
    ledger.reserve("B", version=0)
    ledger.reserve("I")
    ledger.reserve("J")
    finish(ledger, "J")
    assert table(ledger) == ["b a", "J i"]


def test_07_the_second_reserved_moves_when_the_first_may_not() -> None:
    ledger = Ledger(batch_size=3, max_staleness=1, version=1)
    for group_id in "ABC":
        ledger.reserve(group_id)
    ledger.reserve("N")
    ledger.reserve("O", version=0)
    assert table(ledger) == [". o n", "c b a"]
    finish(ledger, "B")
    # N takes B's slot; O, the head of its block, takes N's.
    assert table(ledger) == ["B . o", "c n a"]


def test_08_the_hole_of_a_mover_is_filled_in_turn() -> None:
    """A lets the newer P move from buffer 2 to 3, and that lets the older O follow from 1 to 2."""
    ledger = Ledger(batch_size=1, max_staleness=2, version=1)
    ledger.reserve("A")
    ledger.reserve("P")
    ledger.reserve("O", version=0)
    assert table(ledger) == ["o", "p", "a"]
    assert ledger.occupy("A") == Slot(1, 0)
    assert table(ledger) == ["A", "o", "p"]


def test_09_a_later_ready_buffer_is_not_trained_early() -> None:
    ledger = Ledger(batch_size=1, max_staleness=1, version=1)
    ledger.reserve("old", version=0)
    ledger.reserve("new")
    assert ledger.occupy("new") == Slot(2, 0)
    assert (ledger.state(2), ledger.take()) == (BufferState.READY, None)
    ledger.occupy("old")
    assert ledger.take() == ("old",)


def test_10_ready_while_training_starts_right_after_publish() -> None:
    ledger = filled("AB", batch_size=1, max_staleness=1)
    finish(ledger, "AB")
    assert ledger.take() == ("A",)
    assert ledger.take() is None
    ledger.publish(1)
    assert ledger.take() == ("B",)


def test_11_a_lagging_engine_is_refused_where_a_current_one_is_not() -> None:
    ledger = filled("AB", batch_size=1, max_staleness=1)
    finish(ledger, "A")
    ledger.take()
    ledger.publish(1)
    assert table(ledger) == ["b", "."]
    assert ledger.reserve("C", version=0) is None
    assert ledger.reserve("D", version=1) == Slot(2, 0)


def test_12_a_group_of_mixed_versions_has_the_oldest() -> None:
    ledger = Ledger(batch_size=2, max_staleness=1, version=1)
    ledger.reserve("G")
    assert ledger.where("G") == Slot(2, 1)
    for version in (1, 0, 1, 0):
        assert ledger.lower("G", version)
    assert ledger.version_of("G") == 0
    assert ledger.where("G") == Slot(1, 1)
    assert ledger.in_flight == 1
    check(ledger)


def test_13_a_member_too_old_for_the_groups_place_is_not_waved_through() -> None:
    ledger = Ledger(batch_size=1, max_staleness=1, version=1)
    ledger.reserve("G")
    ledger.reserve("H", version=0)
    # Asking to reserve the member again under version 0 changes neither place nor version.
    assert ledger.reserve("G", version=0) == Slot(2, 0)
    assert ledger.version_of("G") == 1
    # A token of version 0 would need buffer 1, which H holds: reported, and never trained at age 2.
    assert ledger.lower("G", 0) is None
    assert ledger.group_state("G") is GroupState.DROPPED
    assert table(ledger) == ["h", "."]


def test_14_reserving_a_second_time_changes_nothing() -> None:
    ledger = filled("AB", batch_size=2, max_staleness=1)
    before = ledger.to_dict()
    assert ledger.reserve("A") == ledger.where("A")
    assert ledger.reserve("A", version=0) == ledger.where("A")
    assert ledger.to_dict() == before


def test_15_completion_after_an_abort_is_answered() -> None:
    ledger = filled("AB", batch_size=2, max_staleness=0)
    ledger.discard("A")
    before = ledger.to_dict()
    assert ledger.occupy("A") is None
    assert ledger.occupy("A") is None
    assert ledger.reserve("A") is None
    assert ledger.to_dict() == before


def test_16_an_abort_inside_a_tail_leaves_it_contiguous() -> None:
    ledger = Ledger(batch_size=4, max_staleness=1, version=1)
    for group_id in "ABCD":
        ledger.reserve(group_id)
    ledger.reserve("O", version=0)
    assert table(ledger) == [". . . o", "d c b a"]
    assert ledger.discard("B") == [Move("D", Slot(2, 0), Slot(2, 2))]
    assert table(ledger) == [". . . o", ". c d a"]


def test_16_an_abort_is_used_by_an_earlier_reserved_that_may() -> None:
    """Where others may use the slot they do, or a later reserve would be refused needlessly."""
    ledger = filled("ABCDE", batch_size=4, max_staleness=1)
    assert ledger.discard("B") == [Move("E", Slot(0, 3), Slot(1, 2))]
    assert table(ledger) == [". . . .", "d c e a"]


def test_17_a_late_abort_of_a_finished_group_is_rejected() -> None:
    ledger = filled("ABC", batch_size=3, max_staleness=0)
    finish(ledger, "AB")
    before = ledger.to_dict()
    assert ledger.discard("A") == []
    assert ledger.evict("C") == []
    assert ledger.to_dict() == before
    assert ledger.evict("A") == [Move("B", Slot(0, 1), Slot(0, 0))]
    assert table(ledger) == ["B . c"]


def test_18_an_abort_ends_one_group_and_no_other() -> None:
    ledger = filled("ABCDEFGH", batch_size=4, max_staleness=1)
    others = set("ABCEFGH")
    ledger.discard("D")
    assert set(held(ledger, SlotState.RESERVED)) == others
    assert ledger.group_state("D") is GroupState.DROPPED


def test_19_timeout_of_a_stuck_head() -> None:
    ledger = Ledger(batch_size=2, max_staleness=1, version=1)
    ledger.reserve("X", version=0)
    ledger.reserve("Y", version=0)
    for group_id in "AB":
        ledger.reserve(group_id)
    finish(ledger, "AB")
    assert table(ledger) == ["y x", "A B"]
    # The state is there to read at any time; no event needs to arrive before the clock may look.
    assert ledger.state(ledger.taken) is BufferState.STUCK
    stuck = [group_id for group_id, buffer in held(ledger, SlotState.RESERVED).items() if buffer == ledger.taken]
    for group_id in stuck:
        ledger.discard(group_id)
        check(ledger)
    assert table(ledger) == ["B A", ". ."]
    assert ledger.capacity() == len(stuck)
    assert ledger.take() == ("B", "A")


def test_20_timeout_without_enough_later_occupied_waits_for_the_next() -> None:
    ledger = Ledger(batch_size=2, max_staleness=1, version=1)
    ledger.reserve("X", version=0)
    ledger.reserve("Y", version=0)
    ledger.reserve("A")
    ledger.reserve("B")
    finish(ledger, "A")
    ledger.discard("X")
    ledger.discard("Y")
    assert table(ledger) == ["A .", ". b"]
    assert ledger.take() is None
    assert ledger.occupy("B") == Slot(1, 1)
    assert ledger.take() == ("A", "B")


def test_21_an_occupied_is_filtered_and_a_later_one_pulled() -> None:
    ledger = filled("0123", batch_size=2, max_staleness=1)
    finish(ledger, "012")
    assert table(ledger) == ["0 1", "2 3"]
    ledger.evict("0")
    assert table(ledger) == ["1 2", ". 3"]
    assert held(ledger, SlotState.RESERVED) == {"3": 1}


def test_22_filtering_a_ready_buffer_before_it_is_taken() -> None:
    ledger = filled("AB", batch_size=2, max_staleness=0)
    finish(ledger, "AB")
    assert ledger.state(0) is BufferState.READY
    ledger.evict("B")
    assert ledger.state(0) is BufferState.PENDING
    assert ledger.take() is None


def test_23_half_of_all_groups_filtered_for_a_thousand_steps() -> None:
    ledger = Ledger(batch_size=2, max_staleness=1)
    rng = random.Random(0)
    admitted = 0
    while ledger.version < 1000:
        while ledger.capacity():
            assert ledger.reserve(f"g{admitted}"), "capacity promised what reserve refused"
            admitted += 1
        group_id = rng.choice(list(held(ledger, SlotState.RESERVED)))
        if rng.random() < 0.5:
            ledger.occupy(group_id)
            if rng.random() < 0.5:
                ledger.evict(group_id)
        else:
            ledger.discard(group_id)
        if ledger.take():
            ledger.publish(ledger.version + 1)
    check(ledger)
    assert admitted > 3000


def test_24_all_groups_filtered_neither_fills_the_window_nor_the_memory() -> None:
    """Bounding the retries belongs to the caller; the ledger keeps its capacity and a bounded state."""
    ledger = Ledger(batch_size=2, max_staleness=1)
    for index in range(10_000):
        ledger.reserve(f"g{index}")
        ledger.occupy(f"g{index}")
        ledger.evict(f"g{index}")
    assert ledger.capacity() == 4
    assert len(ledger.to_dict()["dropped"]) == 32
    with pytest.raises(UnknownGroup, match="'g0' was never admitted, or ended before"):
        ledger.occupy("g0")


def test_25_surplus_is_judged_by_all_buffers() -> None:
    """Batches of two in three slots. One READY buffer drops nobody; two drop the two left over."""
    ledger = Ledger(batch_size=2, max_staleness=1, slots_per_buffer=3, version=1)
    for group_id in "AXY":
        ledger.reserve(group_id, version=0)
    for group_id in "BCZ":
        ledger.reserve(group_id)
    finish(ledger, "ABC")
    assert (ledger.state(1), ledger.state(2)) == (BufferState.STUCK, BufferState.READY)
    assert ledger.collect_surplus() == ()
    finish(ledger, "X")
    assert ledger.collect_surplus() == ("Y", "Z")
    assert (ledger.in_flight, ledger.state(1), ledger.state(2)) == (0, BufferState.READY, BufferState.READY)


def test_26_finishing_in_the_redundant_tail_without_room_before_it() -> None:
    """Buffer 2 is READY, buffer 1 misses two and all its free slots are held by older groups: Z is surplus."""
    ledger = Ledger(batch_size=3, max_staleness=1, slots_per_buffer=4, version=1)
    for group_id in "AWXY":
        ledger.reserve(group_id, version=0)
    for group_id in "BCDZ":
        ledger.reserve(group_id)
    finish(ledger, "ABCD")
    assert table(ledger) == ["A x w y", "B C D z"]
    assert ledger.occupy("Z") is None
    assert table(ledger) == ["A x w y", "B C D ."]
    assert ledger.collect_surplus() == ()
    check(ledger)


def test_26_finishing_in_the_redundant_tail_of_a_ready_buffer_that_waits() -> None:
    """Only a later buffer wants the group, and it is full: one of its Reserved changes place with the finisher."""
    ledger = filled("ABCDEF", batch_size=2, max_staleness=1, slots_per_buffer=3)
    finish(ledger, "AB")
    assert table(ledger) == ["A B d", "c e f"]
    assert ledger.occupy("D") == Slot(1, 0)
    assert table(ledger) == ["A B c", "D e f"]
    check(ledger)


def test_27_an_open_buffer_keeps_its_reserved() -> None:
    ledger = filled("ABCDEF", batch_size=2, max_staleness=1, slots_per_buffer=3)
    finish(ledger, "AB")
    assert ledger.state(0) is BufferState.READY
    assert ledger.collect_surplus() == ()
    # When the READY buffer leaves, so does the one slot that was beyond the others' need.
    assert ledger.take() == ("A", "B")
    assert ledger.collect_surplus() == ("D",)
    assert table(ledger) == ["c e f"]


def test_28_a_group_that_is_complete_twice_is_placed_once() -> None:
    """The n-th and the next member finish in the same moment: both report the group."""
    ledger = filled("AB", batch_size=2, max_staleness=0)
    place = ledger.occupy("A")
    before = ledger.to_dict()
    assert ledger.occupy("A") == place
    assert ledger.to_dict() == before


def test_29_partial_rollout_across_a_publish_keeps_version_and_range() -> None:
    ledger = filled("AB", batch_size=1, max_staleness=1)
    finish(ledger, "A")
    ledger.take()
    ledger.publish(1)
    assert ledger.lower("B", 1) == Slot(1, 0)
    assert ledger.version_of("B") == 0
    # A hole in buffer 2 is no place for B, whatever it was continued with.
    assert table(ledger) == ["b", "."]


def test_30_a_crash_after_occupy_keeps_the_group_once() -> None:
    ledger = filled("ABCD", batch_size=2, max_staleness=1)
    finish(ledger, "A")
    again = restarted(ledger)
    assert table(again) == table(ledger)
    place = again.where("A")
    assert again.occupy("A") == place
    # What was in flight is still admitted: it is generated again under the same id, or discarded.
    assert set(held(again, SlotState.RESERVED)) == set("BCD")
    finish(again, "BCD")
    assert again.take() == ("A", "B")


def test_31_a_crash_after_training_does_not_train_twice() -> None:
    ledger = filled("AB", batch_size=1, max_staleness=1)
    finish(ledger, "AB")
    batch = ledger.take()
    again = restarted(ledger)
    assert again.take() is None
    assert again.batch(0) == batch == ("A",)
    again.publish(1)
    again.publish(1)
    assert again.version == 1
    assert again.take() == ("B",)


def test_32_resume_at_a_step_opens_its_window_only() -> None:
    ledger = Ledger(batch_size=3, max_staleness=2, version=7)
    assert ledger.buffers == range(7, 10)
    assert ledger.capacity() == 9


def test_33_a_smaller_bound_on_resume_evicts_what_it_forbids() -> None:
    ledger = Ledger(batch_size=1, max_staleness=2, version=2)
    ledger.reserve("N")
    ledger.reserve("O", version=1)
    ledger.reserve("P", version=0)
    finish(ledger, "O")
    assert table(ledger) == ["p", "O", "n"]
    again = restarted(ledger)
    assert set(again.set_max_staleness(0)) == {"O", "P"}
    assert table(again) == ["n"]
    assert again.occupy("O") is None
    check(again)


def test_34_two_admissions_race_for_the_last_slot() -> None:
    ledger = filled("ABC", batch_size=2, max_staleness=1)
    assert ledger.reserve("D") == Slot(0, 0)
    assert ledger.reserve("E") is None
    assert (ledger.reserve("D"), ledger.in_flight) == (Slot(0, 0), 4)


def test_35_pulling_forward_emits_no_group_twice() -> None:
    ledger = filled("ABCDEF", batch_size=2, max_staleness=2)
    finish(ledger, "ABCD")
    taken = list(ledger.take() or ())
    # The batch in training is out of reach; what is pulled is pulled among the rest.
    assert ledger.evict("A") == []
    ledger.evict("C")
    finish(ledger, "EF")
    for version in (1, 2):
        ledger.publish(version)
        taken += ledger.take() or ()
    assert taken == ["A", "B", "D", "E"]
    assert held(ledger, SlotState.OCCUPIED) == {"F": 2}


def test_36_a_hundred_thousand_random_calls() -> None:
    rng = random.Random(36)
    ledger = Ledger(batch_size=3, max_staleness=2)
    trained: list[str] = []
    admitted = dropped = calls = 0
    versions: dict[str, int] = {}
    running: list[str] = []
    while calls < 100_000:
        calls += 1
        choice = rng.random()
        if choice < 0.45 or not running:
            group_id = f"g{admitted}"
            lag = rng.choice((0, 0, 0, 1, 2))
            if ledger.reserve(group_id, ledger.version - lag):
                versions[group_id] = ledger.version - lag
                running.append(group_id)
                admitted += 1
        elif choice < 0.9:
            assert ledger.occupy(running.pop(rng.randrange(len(running))))
        elif choice < 0.95:
            ledger.discard(running.pop(rng.randrange(len(running))))
            dropped += 1
        else:
            finished = list(held(ledger, SlotState.OCCUPIED))
            if finished:
                ledger.evict(rng.choice(finished))
                dropped += 1
        batch = ledger.take()
        if batch:
            assert all(0 <= ledger.version - versions[g] <= 2 for g in batch)
            trained += batch
            ledger.publish(ledger.version + 1)
        if calls % 250 == 0:
            check(ledger)
        assert ledger.in_flight == len(running)
    assert len(trained) == len(set(trained)) == 3 * ledger.version
    assert admitted == len(trained) + dropped + ledger.in_flight + ledger.occupied
