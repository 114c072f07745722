"""A ledger that was written and read goes on exactly as the one that was not."""

from __future__ import annotations

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from roadstead.staleness import Ledger, SlotState

from .tables import held


def call(ledger: Ledger, rng: random.Random, number: int) -> object:
    """One random call and its answer; the same random numbers make the same call on an equal ledger."""
    choice = rng.choice(["reserve", "reserve", "occupy", "occupy", "discard", "evict", "lower", "take"])
    if choice == "reserve":
        return ledger.reserve(f"g{number}", ledger.version - rng.choice((0, 0, 1)))
    if choice == "take":
        batch = ledger.take()
        if ledger.taken == ledger.version + 1:
            ledger.publish(ledger.version + 1)
        return batch, ledger.collect_surplus() if rng.random() < 0.5 else ()
    wanted = SlotState.OCCUPIED if choice == "evict" else SlotState.RESERVED
    groups = list(held(ledger, wanted))
    if not groups:
        return None
    group_id = rng.choice(groups)
    if choice == "lower":
        return ledger.lower(group_id, ledger.version_of(group_id) - 1)
    return {"occupy": ledger.occupy, "discard": ledger.discard, "evict": ledger.evict}[choice](group_id)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 5),
    max_staleness=st.integers(0, 3),
    extra=st.integers(0, 2),
    target=st.none() | st.integers(0, 4),
)
def test_the_copy_behaves_the_same(
    seed: int, batch_size: int, max_staleness: int, extra: int, target: int | None
) -> None:
    ledger = Ledger(
        batch_size=batch_size,
        max_staleness=max_staleness,
        slots_per_buffer=batch_size + extra,
        step_target=target,
    )
    rng = random.Random(seed)
    for number in range(40):
        call(ledger, rng, number)
    copy = Ledger.from_dict(json.loads(json.dumps(ledger.to_dict())))
    twin = random.Random()
    twin.setstate(rng.getstate())
    for number in range(40, 80):
        assert call(copy, twin, number) == call(ledger, rng, number)
        assert copy.to_dict() == ledger.to_dict()
