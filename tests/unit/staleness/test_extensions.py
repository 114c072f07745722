"""The examples of the post's section 7: dropping Reserved, filtering Occupied, over-sampling whole batches."""

from __future__ import annotations

from roadstead.staleness import BufferState, GroupState, Ledger, Move, Slot

from .tables import check, table


def test_7_1_partial_rollout_keeps_the_version_of_admission() -> None:
    ledger = Ledger(batch_size=1, max_staleness=1)
    ledger.reserve("A")
    ledger.reserve("B")
    ledger.occupy("B")
    ledger.take()
    ledger.publish(1)
    # A goes on under version 1; an engine that reports it can't make A younger.
    assert ledger.lower("A", 1) == Slot(1, 0)
    assert ledger.version_of("A") == 0
    ledger.reserve("C")
    assert table(ledger) == ["a", "c"]
    assert ledger.occupy("A") == Slot(1, 0)


def test_7_2_reserved_of_a_stuck_buffer_are_dropped() -> None:
    """The head waits for X and Y, which are too old for anything later; time out, pull forward, admit new ones."""
    ledger = Ledger(batch_size=4, max_staleness=1, version=1)
    for group_id in "ABXY":
        ledger.reserve(group_id, version=0)
    for group_id in "ECFD":
        ledger.reserve(group_id)
    for group_id in "ABCD":
        ledger.occupy(group_id)
    assert table(ledger) == ["A B x y", "C D f e"]
    assert ledger.state(1) is BufferState.STUCK

    assert ledger.discard("X") == [Move("D", Slot(2, 1), Slot(1, 2))]
    assert table(ledger) == ["A B D y", "C . f e"]
    assert ledger.discard("Y") == [Move("C", Slot(2, 0), Slot(1, 3))]
    assert table(ledger) == ["A B D C", ". . f e"]
    assert ledger.state(1) is BufferState.READY
    check(ledger)

    assert ledger.capacity() == 2
    assert ledger.reserve("G") == Slot(2, 1)
    assert ledger.reserve("H") == Slot(2, 0)
    assert ledger.reserve("I") is None
    assert ledger.take() == ("A", "B", "D", "C")


def test_7_3_an_occupied_is_filtered() -> None:
    ledger = Ledger(batch_size=3, max_staleness=1)
    for group_id in "ABCDEF":
        ledger.reserve(group_id)
    for group_id in "ABCD":
        ledger.occupy(group_id)
    assert table(ledger) == ["A B C", "D e f"]
    assert ledger.evict("C") == [Move("D", Slot(1, 0), Slot(0, 2))]
    assert table(ledger) == ["A B D", ". e f"]
    assert ledger.reserve("G") == Slot(1, 0)
    assert table(ledger) == ["A B D", "g e f"]
    assert ledger.group_state("C") is GroupState.DROPPED
    check(ledger)


def oversampled() -> Ledger:
    """Batches of two in three slots: buffer 1 has one Occupied and two old Reserved; buffer 2 is READY and has one."""
    ledger = Ledger(batch_size=2, max_staleness=1, slots_per_buffer=3, version=1)
    for group_id in "AXY":
        ledger.reserve(group_id, version=0)
    for group_id in "BCZ":
        ledger.reserve(group_id)
    for group_id in "ABC":
        ledger.occupy(group_id)
    assert table(ledger) == ["A x y", "B C z"]
    assert ledger.state(2) is BufferState.READY
    # A READY buffer alone makes nobody surplus: the open one before it can still use them all.
    assert ledger.collect_surplus() == ()
    return ledger


def test_7_6_when_both_are_ready_the_rest_is_surplus() -> None:
    ledger = oversampled()
    assert ledger.occupy("Y") == Slot(1, 1)
    assert table(ledger) == ["A Y .", "B C ."]
    assert ledger.collect_surplus() == ("X", "Z")
    assert ledger.collect_surplus() == ()
    assert ledger.occupy("Z") is None
    # Nobody would train what a READY buffer's spare slot admits.
    assert (ledger.capacity(), ledger.reserve("D")) == (0, None)
    check(ledger)


def test_7_6_the_first_to_finish_may_stand_in_the_later_buffer() -> None:
    """X and Y can't make room, but once Z completes buffer 1 nobody needs them."""
    ledger = oversampled()
    assert ledger.occupy("Z") == Slot(1, 1)
    assert ledger.collect_surplus() == ("X", "Y")
    assert table(ledger) == ["A Z .", "B C ."]
    assert ledger.take() == ("A", "Z")
    check(ledger)
