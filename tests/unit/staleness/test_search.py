"""Small ledgers against a search over all assignments: every admission, every placement, every lowering.

The state machine does the same where its cases are small enough; here all are, so that the comparison is dense.
"""

from __future__ import annotations

import random
from itertools import product

import pytest

from roadstead.staleness import Ledger, SlotState

from .tables import assignable, check, earliest_by_search, held, reserved_deadlines, room

SHAPES = [(b, s, 0) for b, s in product((1, 2, 3), (0, 1, 2))] + [(2, 1, 1), (2, 2, 1), (3, 1, 1), (2, 1, 2)]


@pytest.mark.parametrize(("batch_size", "max_staleness", "extra"), SHAPES)
def test_every_choice_equals_the_search(batch_size: int, max_staleness: int, extra: int) -> None:
    rng = random.Random(f"{batch_size} {max_staleness} {extra}")
    ledger = Ledger(batch_size=batch_size, max_staleness=max_staleness, slots_per_buffer=batch_size + extra, version=5)
    for number in range(1000):
        choice = rng.choice(("reserve", "reserve", "reserve", "occupy", "occupy", "lower", "discard", "evict"))
        if choice == "reserve":
            version = ledger.version - rng.choice((0, 0, 1, 2))
            wanted = [*reserved_deadlines(ledger).values(), version + max_staleness]
            possible = assignable(room(ledger), wanted)
            slot = ledger.reserve(f"g{number}", version)
            # With over-sampling a free slot may be one that nobody wants.
            assert slot is None or possible
            assert extra or (slot is not None) == possible
        else:
            groups = list(held(ledger, SlotState.OCCUPIED if choice == "evict" else SlotState.RESERVED))
            if groups:
                act(ledger, choice, rng.choice(groups))
        check(ledger)
        # Sometimes the trainer is busy, so that READY buffers wait among the others.
        if rng.random() < 0.3 and ledger.take():
            ledger.publish(ledger.version + 1)
            check(ledger)


def act(ledger: Ledger, choice: str, group_id: str) -> None:
    if choice == "occupy":
        expected = earliest_by_search(ledger, group_id)
        slot = ledger.occupy(group_id)
        assert (slot and slot.buffer) == expected
    elif choice == "lower":
        version = ledger.version_of(group_id) - 1
        deadlines = {**reserved_deadlines(ledger), group_id: version + ledger.max_staleness}
        possible = assignable(room(ledger), list(deadlines.values()))
        slot = ledger.lower(group_id, version)
        assert slot is None or possible
        # With over-sampling a possible place may be one that nobody wants any more.
        assert ledger.slots_per_buffer > ledger.batch_size or (slot is not None) == possible
    elif choice == "discard":
        ledger.discard(group_id)
    else:
        ledger.evict(group_id)
