"""The ledger's surface beyond the protocol's examples: refusals, answers to retries, targets, the dictionary."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from roadstead.staleness import BufferState, GroupState, Ledger, Move, OutOfOrder, Slot, SlotState, UnknownGroup

from .tables import check, table


def running(group_ids: str, **shape: Any) -> Ledger:
    ledger = Ledger(**shape)
    for group_id in group_ids:
        assert ledger.reserve(group_id)
    return ledger


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"batch_size": 0, "max_staleness": 1}, r"batch_size: 0 .*use at least 1"),
        ({"batch_size": 1, "max_staleness": -1}, r"max_staleness: -1 .*use 0"),
        (
            {"batch_size": 4, "max_staleness": 1, "slots_per_buffer": 3},
            r"slots_per_buffer: 3 .*batch_size: 4; raise it",
        ),
        ({"batch_size": 4, "max_staleness": 1, "version": -1}, r"version: -1 .*use 0"),
        ({"batch_size": 4, "max_staleness": 1, "version": 5, "step_target": 4}, r"step_target: 4 .*use 5 or later"),
    ],
)
def test_an_impossible_configuration_is_refused(shape: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ledger(**shape)


def test_the_smallest_configurations_are_accepted() -> None:
    ledger = Ledger(batch_size=1, max_staleness=0, slots_per_buffer=1, step_target=0)
    assert (ledger.batch_size, ledger.max_staleness, ledger.slots_per_buffer) == (1, 0, 1)
    assert (ledger.version, ledger.taken, ledger.step_target, ledger.capacity()) == (0, 0, 0, 0)
    assert ledger.take() is None


def test_calls_about_a_group_that_was_never_admitted() -> None:
    ledger = Ledger(batch_size=1, max_staleness=0)
    for call in (ledger.occupy, ledger.discard, ledger.evict, ledger.where, ledger.group_state, ledger.version_of):
        with pytest.raises(UnknownGroup, match="'A'"):
            call("A")
    with pytest.raises(UnknownGroup, match="'A'"):
        ledger.lower("A", 0)


def test_a_trained_group_answers_until_no_retry_can_lag_so_far() -> None:
    ledger = Ledger(batch_size=2, max_staleness=1)
    for step in range(5):
        ledger.reserve(f"a{step}")
        ledger.reserve(f"b{step}")
        ledger.reserve(f"x{step}")
        ledger.discard(f"x{step}")
        ledger.occupy(f"a{step}")
        ledger.occupy(f"b{step}")
        ledger.take()
        ledger.publish(step + 1)
        first = max(0, step - 3)
        for kept in range(first, step + 1):
            assert ledger.batch(kept) == (f"a{kept}", f"b{kept}")
            assert ledger.occupy(f"b{kept}") == ledger.reserve(f"b{kept}") == Slot(kept, 1)
            assert ledger.discard(f"b{kept}") == ledger.evict(f"b{kept}") == []
            assert ledger.lower(f"b{kept}", 0) == Slot(kept, 1)
            assert ledger.group_state(f"b{kept}") is GroupState.TRAINED
            assert ledger.group_state(f"x{kept}") is GroupState.DROPPED
            with pytest.raises(UnknownGroup, match="not held"):
                ledger.version_of(f"b{kept}")
    for forgotten in ("a0", "x0"):
        with pytest.raises(UnknownGroup, match="ended before buffer"):
            ledger.group_state(forgotten)
    assert ledger.batch(0) is None


def test_publish_out_of_order() -> None:
    ledger = running("A", batch_size=1, max_staleness=0, version=3)
    ledger.occupy("A")
    with pytest.raises(OutOfOrder, match=r"version: 4 .*take buffer 3 and publish 4"):
        ledger.publish(4)
    ledger.take()
    with pytest.raises(OutOfOrder, match=r"version: 5 "):
        ledger.publish(5)
    ledger.publish(3)
    assert ledger.version == 3
    ledger.publish(4)
    ledger.publish(4)
    assert (ledger.version, ledger.taken) == (4, 4)


def test_an_engine_ahead_of_the_ledger_counts_as_the_published_version() -> None:
    ledger = Ledger(batch_size=1, max_staleness=1)
    assert ledger.reserve("A", version=1) == Slot(1, 0)
    assert ledger.version_of("A") == 0


def test_buffers_outside_the_window() -> None:
    ledger = Ledger(batch_size=1, max_staleness=1, version=2)
    for buffer in (1, 4):
        for ask in (ledger.state, ledger.slots):
            with pytest.raises(ValueError, match=rf"buffer: {buffer} is not in the window 2\.\.3"):
                ask(buffer)


def test_counts_and_states() -> None:
    ledger = running("ABC", batch_size=2, max_staleness=1)
    ledger.occupy("A")
    assert (ledger.in_flight, ledger.occupied, ledger.capacity()) == (2, 1, 1)
    assert ledger.slots(0) == ((SlotState.OCCUPIED, "A"), (SlotState.EMPTY, None))
    assert ledger.slots(1) == ((SlotState.RESERVED, "B"), (SlotState.RESERVED, "C"))
    assert (ledger.state(0), ledger.state(1)) == (BufferState.PENDING, BufferState.STUCK)


def test_the_first_reserved_moves_by_buffer_then_slot() -> None:
    ledger = running("ABC", batch_size=1, max_staleness=2)
    assert table(ledger) == ["c", "b", "a"]
    # B and C may both take A's slot: C stands in the earlier buffer.
    ledger.occupy("A")
    assert table(ledger) == ["A", "b", "c"]

    ledger = Ledger(batch_size=1, max_staleness=3, version=2)
    for group_id, version in zip("AXNO", (2, 2, 2, 1), strict=True):
        ledger.reserve(group_id, version)
    assert table(ledger) == ["o", "n", "x", "a"]
    # N and O may both take X's slot, and O stands in the earlier buffer although it can't wait as long.
    ledger.occupy("X")
    assert table(ledger) == ["X", "n", "o", "a"]

    ledger = Ledger(batch_size=2, max_staleness=2, version=1)
    for group_id, version in zip("ABCDEF", (1, 1, 1, 0, 0, 1), strict=True):
        ledger.reserve(group_id, version)
    assert table(ledger) == ["f e", "d c", "b a"]
    # E and F may both take C's slot, and F stands before E although it may wait longer.
    ledger.occupy("C")
    assert table(ledger) == ["C e", "d f", "b a"]


def test_who_may_move_is_known_after_the_one_that_waits_longest_left() -> None:
    ledger = Ledger(batch_size=2, max_staleness=2, version=1)
    for group_id, version in zip("ABCDON", (1, 1, 1, 1, 0, 1), strict=True):
        ledger.reserve(group_id, version)
    assert table(ledger) == ["n o", "d c", "b a"]
    ledger.discard("N")
    assert table(ledger) == [". o", "d c", "b a"]
    ledger.occupy("C")
    assert table(ledger) == ["C .", "d o", "b a"]


def test_lower_moves_a_reserved_to_an_earlier_buffer() -> None:
    ledger = running("ABC", batch_size=2, max_staleness=1, version=1)
    assert table(ledger) == [". c", "b a"]
    # A leaves buffer 2, and C, who may stand there, takes its slot.
    assert ledger.lower("A", 0) == Slot(1, 1)
    assert table(ledger) == [". a", "b c"]
    assert ledger.version_of("A") == 0
    check(ledger)


def test_lower_by_more_than_the_bound_is_reported() -> None:
    ledger = running("AB", batch_size=2, max_staleness=1, version=3)
    assert ledger.lower("A", 1) is None
    assert ledger.lower("A", 0) is None
    assert ledger.occupy("A") is None
    assert table(ledger) == [". .", ". b"]
    assert ledger.collect_surplus() == ()


def test_lower_of_an_occupied() -> None:
    ledger = running("ABCD", batch_size=2, max_staleness=1, version=1)
    for group_id in "ABC":
        ledger.occupy(group_id)
    assert table(ledger) == ["A B", "C d"]
    assert ledger.lower("A", 0) == Slot(1, 0)
    assert ledger.version_of("A") == 0
    # C stands in buffer 2, which is too late for version 0, and buffer 1 has no room.
    assert ledger.lower("C", 0) is None
    assert table(ledger) == ["A B", ". d"]
    check(ledger)


def test_lower_of_an_oversampled_group_that_no_buffer_wants_any_more() -> None:
    ledger = running("ABCDEF", batch_size=2, max_staleness=1, slots_per_buffer=3, version=1)
    ledger.occupy("A")
    ledger.occupy("B")
    assert table(ledger) == ["A B d", "c e f"]
    assert ledger.lower("D", 0) is None
    assert ledger.group_state("D") is GroupState.DROPPED
    # The caller knows from the answer, it is not told a second time.
    assert ledger.collect_surplus() == ()
    check(ledger)


def test_lower_keeps_an_oversampled_group_in_the_spare_slot_of_a_ready_buffer() -> None:
    """An earlier buffer may still want it; only new groups are not admitted there."""
    ledger = Ledger(batch_size=1, max_staleness=2, slots_per_buffer=2, version=3)
    for group_id, version in (("P", 1), ("Q", 1), ("A", 2), ("G", 3)):
        ledger.reserve(group_id, version)
    ledger.occupy("A")
    assert table(ledger) == ["q p", "A .", ". g"]
    assert ledger.reserve("N", version=2) is None
    assert ledger.lower("G", 2) == Slot(4, 1)
    assert table(ledger) == ["q p", "A g", ". ."]
    check(ledger)


def test_surplus_ends_exactly_before_the_first_buffer_that_wants_groups() -> None:
    ledger = Ledger(batch_size=1, max_staleness=1, slots_per_buffer=3, version=1)
    for group_id, version in (("A", 1), ("B", 1), ("C", 1), ("X", 0), ("Y", 1), ("Z", 0)):
        ledger.reserve(group_id, version)
    assert table(ledger) == ["z y x", "c b a"]
    ledger.occupy("Z")
    assert ledger.collect_surplus() == ("X",)
    assert table(ledger) == ["Z . y", "c b a"]
    check(ledger)


def test_discard_tells_every_move() -> None:
    """X leaves buffer 3: N moves there from 2, O to 2 from 1, and then buffer 1 has room for nobody later."""
    ledger = Ledger(batch_size=1, max_staleness=2, version=1)
    ledger.reserve("X")
    ledger.reserve("N")
    ledger.reserve("O", version=0)
    assert ledger.discard("X") == [Move("N", Slot(2, 0), Slot(3, 0)), Move("O", Slot(1, 0), Slot(2, 0))]
    assert table(ledger) == [".", "o", "n"]


def test_evict_pulls_one_from_each_later_buffer() -> None:
    ledger = running("ABCDEF", batch_size=2, max_staleness=2)
    for group_id in "ABCDE":
        ledger.occupy(group_id)
    assert table(ledger) == ["A B", "C D", "E f"]
    assert ledger.evict("A") == [
        Move("B", Slot(0, 1), Slot(0, 0)),
        Move("D", Slot(1, 1), Slot(0, 1)),
        Move("E", Slot(2, 0), Slot(1, 1)),
    ]
    assert table(ledger) == ["B D", "C E", ". f"]


def test_evict_lets_a_reserved_leave_a_ready_buffer() -> None:
    """Over-sampling: D waits in a spare slot of buffer 0, and would be dropped when that is taken."""
    ledger = running("ABCDEF", batch_size=2, max_staleness=1, slots_per_buffer=3)
    for group_id in "ABC":
        ledger.occupy(group_id)
    assert table(ledger) == ["A B d", "C e f"]
    assert ledger.evict("C") == [Move("D", Slot(0, 2), Slot(1, 0))]
    assert table(ledger) == ["A B .", "d e f"]
    check(ledger)


def test_a_step_target_clips_the_window_from_the_start() -> None:
    ledger = Ledger(batch_size=1, max_staleness=3, step_target=2)
    assert ledger.buffers == range(2)
    assert [ledger.reserve(group_id) for group_id in "ABC"] == [Slot(1, 0), Slot(0, 0), None]
    for version, group_id in enumerate("AB", start=1):
        ledger.occupy(group_id)
        assert ledger.take() == (group_id,)
        ledger.publish(version)
        assert ledger.reserve("C") is None
    assert (ledger.version, len(ledger.buffers), ledger.take()) == (2, 0, None)


def test_a_drain_wastes_nothing() -> None:
    """Five groups are held, so three batches of two end the run: one more group is needed and one more is admitted."""
    ledger = running("ABCDE", batch_size=2, max_staleness=3)
    ledger.occupy("B")
    assert table(ledger) == ["B .", ". .", "d c", "e a"]
    assert ledger.drain_target == 3
    assert ledger.set_step_target(ledger.drain_target) == ()
    assert table(ledger) == ["B .", "c e", "a d"]
    assert (ledger.step_target, ledger.capacity()) == (3, 1)
    check(ledger)
    assert ledger.reserve("F") == Slot(0, 1)
    assert ledger.reserve("G") is None
    trained: list[str] = []
    for group_id in "ACDEF":
        ledger.occupy(group_id)
    while batch := ledger.take():
        trained += batch
        ledger.publish(ledger.version + 1)
    assert sorted(trained) == list("ABCDEF")
    assert ledger.version == 3


def test_a_target_set_while_a_batch_is_in_training() -> None:
    ledger = running("ABCD", batch_size=2, max_staleness=1)
    ledger.occupy("A")
    ledger.occupy("B")
    ledger.take()
    with pytest.raises(ValueError, match=r"step_target: 0 .*use 1 or later"):
        ledger.set_step_target(0)
    assert ledger.drain_target == 2
    assert ledger.set_step_target(2) == ()
    assert table(ledger) == ["c d"]


def test_a_target_without_room_for_all_keeps_the_finished() -> None:
    ledger = running("ABCD", batch_size=2, max_staleness=1)
    for group_id in "BCD":
        ledger.occupy(group_id)
    assert table(ledger) == ["B C", "D a"]
    assert ledger.set_step_target(1) == ("D", "A")
    assert table(ledger) == ["B C"]
    assert ledger.occupy("A") is None
    check(ledger)


def test_a_target_without_room_for_all_keeps_the_older() -> None:
    ledger = Ledger(batch_size=1, max_staleness=2, version=2)
    ledger.reserve("N")
    ledger.reserve("O", version=1)
    ledger.reserve("P", version=1)
    assert table(ledger) == ["p", "o", "n"]
    assert ledger.set_step_target(4) == ("N",)
    assert table(ledger) == ["p", "o"]


def test_a_target_can_be_lifted_again() -> None:
    ledger = running("ABC", batch_size=1, max_staleness=2, step_target=3)
    ledger.occupy("A")
    ledger.take()
    ledger.publish(1)
    assert table(ledger) == ["b", "c"]
    assert ledger.set_step_target(None) == ()
    assert ledger.buffers == range(1, 4)
    assert table(ledger) == ["b", "c", "."]
    assert ledger.reserve("D") == Slot(3, 0)


def test_a_larger_bound_lets_reserved_move_later_and_finished_earlier() -> None:
    ledger = Ledger(batch_size=1, max_staleness=1, version=1)
    ledger.reserve("X", version=0)
    ledger.reserve("A")
    ledger.occupy("A")
    assert table(ledger) == ["x", "A"]
    assert ledger.set_max_staleness(2) == ()
    assert table(ledger) == ["A", "x", "."]
    assert ledger.max_staleness == 2
    with pytest.raises(ValueError, match=r"max_staleness: -1"):
        ledger.set_max_staleness(-1)


def test_setting_what_is_set_already_changes_nothing() -> None:
    ledger = running("ABCDE", batch_size=2, max_staleness=2, step_target=9)
    before = ledger.to_dict()
    assert ledger.set_max_staleness(2) == ledger.set_step_target(9) == ()
    assert ledger.to_dict() == before


def test_more_slots_admit_more_groups() -> None:
    ledger = running("ABCDEF", batch_size=2, max_staleness=1, slots_per_buffer=3)
    assert ledger.reserve("G") is None
    for group_id in "ABC":
        ledger.occupy(group_id)
    assert table(ledger) == ["A B d", "C e f"]
    assert ledger.state(0) is BufferState.READY
    ledger.discard("D")
    assert table(ledger) == ["A B .", "C e f"]
    # Only the READY buffer has an Empty slot: what it would admit nobody would train.
    assert (ledger.capacity(), ledger.reserve("G")) == (0, None)
    ledger.discard("E")
    # Now buffer 1 wants one, and takes it: buffer 0's slot is before it and adds nothing.
    assert ledger.capacity() == 1
    assert ledger.reserve("G") == Slot(1, 1)
    assert ledger.reserve("H") is None


def test_surplus_waits_to_be_collected_across_a_restart() -> None:
    ledger = running("ABC", batch_size=1, max_staleness=0, slots_per_buffer=3)
    ledger.occupy("B")
    again = Ledger.from_dict(ledger.to_dict())
    assert again.collect_surplus() == ("C", "A")
    assert again.collect_surplus() == ()
    assert again.take() == ("B",)


def state_of(ledger: Ledger) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(ledger.to_dict()))
    return state


def test_the_dictionary_is_small() -> None:
    """A run of 16 groups a batch carries it through every continue-as-new and step record."""
    ledger = Ledger(batch_size=16, max_staleness=2)
    for step in range(10):
        while ledger.capacity():
            assert ledger.reserve(f"group-{step:03}-{ledger.capacity():04}")
        for buffer in ledger.buffers:
            for _, group_id in ledger.slots(buffer)[: 16 if buffer == ledger.taken else 8]:
                assert group_id is not None
                ledger.occupy(group_id)
        assert ledger.take()
        ledger.publish(step + 1)
    assert len(json.dumps(ledger.to_dict())) < 4096


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.update(format=2), r"format: 2 .*release that wrote it"),
        (lambda s: s.pop("format"), r"format: None"),
        (lambda s: s.update(batch_size=0), r"batch_size: 0"),
        (lambda s: s["buffers"].pop(), r"buffers: 1 from taken: 1 on"),
        (lambda s: s.update(taken=3), r"taken: 3 on do not fit version: 1"),
        (lambda s: s["buffers"][0][0].append(["N", 1]), r"buffer 1 is overfull"),
        (lambda s: s["buffers"][1][1].extend([["N", 1], ["M", 1]]), r"buffer 2 is overfull"),
        (lambda s: s["buffers"][1][1].append(["C", 1]), r"group 'C' of version 1 is twice"),
        (lambda s: s["buffers"][1][1].append(["N", 0]), r"group 'N' of version 0 .*too old for buffer 2"),
    ],
)
def test_a_damaged_dictionary_is_refused(damage: Any, message: str) -> None:
    ledger = running("ABCD", batch_size=2, max_staleness=1)
    for group_id in "ABCD":
        ledger.occupy(group_id)
    ledger.take()
    ledger.publish(1)
    ledger.reserve("E")
    assert table(ledger) == ["C D", ". e"]
    state = state_of(ledger)
    assert table(Ledger.from_dict(copy.deepcopy(state))) == table(ledger)
    damage(state)
    with pytest.raises(ValueError, match=message):
        Ledger.from_dict(state)
