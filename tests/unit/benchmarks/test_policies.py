"""The rules by hand: how many groups each admits, which it hands out, what it throws away."""

from __future__ import annotations

import pytest

from roadstead.benchmarks.simulator.policies import POLICIES, Group, Policy, QueuePolicy

B = 4


class Hand:
    """Drives a policy one group at a time."""

    def __init__(self, name: str, bound: int) -> None:
        self.policy: Policy = POLICIES[name](B, bound)
        self.groups: list[Group] = []

    def admit(self, most: int = 100) -> int:
        """Admit all it takes, up to `most`; how many."""
        before = len(self.groups)
        while len(self.groups) - before < most:
            group = Group(len(self.groups), 8, self.policy.version)
            if not self.policy.admit(group):
                break
            self.groups.append(group)
        return len(self.groups) - before

    def finish(self, *numbers: int) -> None:
        for number in numbers:
            self.groups[number].finished = True
            self.policy.finish(self.groups[number])

    def take(self) -> list[int] | None:
        batch = self.policy.take()
        return None if batch is None else [group.id for group in batch]

    def dropped(self) -> list[int]:
        return [group.id for group in self.policy.collect_dropped()]


@pytest.mark.parametrize(
    ("name", "bound", "first", "later"),
    [
        ("reserve_occupy", 2, 3 * B, B),
        ("in_order", 2, 3 * B, B),
        ("admission_gate", 2, 3 * B, B),
        ("mask_over_age", 2, 3 * B, B),
        ("verl_wait", 2, 3 * B, B),
        ("roll", 2, 3 * B, B),
        ("verl_drop", 2, 2 * B, B),
        ("trl", 2, 2 * B, B),
        ("synchronous", 2, B, B),
    ],
)
def test_how_many_groups_are_admitted_at_first_and_for_each_version(
    name: str, bound: int, first: int, later: int
) -> None:
    hand = Hand(name, bound)
    assert hand.admit() == first
    hand.finish(*range(B))
    assert hand.take() == list(range(B))
    if name != "trl":
        assert hand.admit() == 0, "weights are public at the end of training"
    hand.policy.publish()
    assert hand.admit() == later


def test_ship_side_gate_counts_what_is_finished_and_not_what_runs() -> None:
    hand = Hand("ship_side_gate", 1)
    assert hand.admit() == 100
    hand.finish(*range(2 * B - 1))
    assert hand.admit() == 100
    hand.finish(2 * B - 1)
    assert hand.admit() == 0, "batch 2 is not assembled before version 1"
    hand.take()
    hand.policy.publish()
    assert hand.admit() == 100


def test_in_order_waits_for_the_batch_that_was_fixed() -> None:
    hand = Hand("in_order", 1)
    hand.admit()
    hand.finish(0, 1, 2, 4, 5, 6, 7)
    assert hand.take() is None
    hand.finish(3)
    assert hand.take() == [0, 1, 2, 3]


def test_reserve_occupy_fills_the_batch_with_what_is_finished() -> None:
    hand = Hand("reserve_occupy", 1)
    hand.admit()
    hand.finish(7, 2, 5, 1)
    assert hand.take() == [7, 2, 5, 1]


@pytest.mark.parametrize("name", ["verl_drop", "trl", "roll"])
def test_what_is_too_old_is_dropped_and_its_place_given_back(name: str) -> None:
    """Bound 1; group 0 is slow and reaches age 2."""
    hand = Hand(name, 1)
    hand.admit(2)
    for _ in range(2):
        ready: list[int] = []
        while len(ready) < B:
            hand.admit(1)
            ready.append(next(group.id for group in hand.groups[1:] if not group.finished))
            hand.finish(ready[-1])
        assert hand.take() == ready
        hand.policy.publish()
    hand.admit()
    if name != "roll":
        assert hand.dropped() == [], "it still runs"
        hand.finish(0)
        hand.admit()
        hand.take()
    assert hand.dropped() == [0]
    assert isinstance(hand.policy, QueuePolicy)
    assert hand.policy.counted == len(hand.groups) - 1, "its place is given back"


@pytest.mark.parametrize("name", ["verl_wait", "verl_drop", "roll"])
def test_the_oldest_finished_are_trained_first(name: str) -> None:
    hand = Hand(name, 1)
    hand.admit(B + 1)
    hand.finish(*range(B))
    hand.take()
    hand.policy.publish()
    hand.admit(B)
    hand.finish(*range(B + 1, 2 * B + 1), B)
    batch = hand.take()
    assert batch is not None and batch[0] == B


def test_verl_wait_takes_nothing_while_a_group_of_the_last_age_runs() -> None:
    hand = Hand("verl_wait", 1)
    hand.admit()
    hand.finish(*range(B))
    hand.take()
    hand.policy.publish()
    hand.admit()
    hand.finish(*range(B, 2 * B - 1), 2 * B, 2 * B + 1)
    assert hand.take() is None
    hand.finish(2 * B - 1)
    assert hand.take() == list(range(B, 2 * B))


def test_masking_is_by_the_version_of_the_batch() -> None:
    hand = Hand("mask_over_age", 2)
    assert hand.policy.oldest_trained() <= 0
    for _ in range(5):
        hand.policy.publish()
    assert hand.policy.oldest_trained() == 3


def test_trl_stops_when_its_queue_is_full() -> None:
    hand = Hand("trl", 64)
    number = 0
    while hand.admit(1):
        hand.finish(number)
        number += 1
    assert number == 1024 // 8


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_says_what_it_promises_and_where_it_comes_from(name: str) -> None:
    policy = POLICIES[name]
    assert policy.name == name
    assert isinstance(policy.strict, bool) and isinstance(policy.discards, bool)
    text = __import__(policy.__module__, fromlist=["x"]).__doc__ or ""
    assert "Source:" in text or name == "synchronous"
