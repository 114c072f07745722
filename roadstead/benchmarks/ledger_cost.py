"""Microseconds a ledger operation: `python -m roadstead.benchmarks.ledger_cost`.

Owns: one steady schedule and its timing. Never touches: anything but the ledger.
Invariant: the schedule depends on the seed and the shape only, so that two runs time the same calls.
A crash leaves: nothing.

The schedule fills the window, lets half a batch of groups in flight finish in random order, takes and publishes when
it may. Finishing at random is the expensive case: most finishers leave a place that a chain of moves fills.
"""

from __future__ import annotations

import random
import time

from roadstead.staleness import Ledger

_OPERATIONS = 30_000
_REPEATS = 5
"""The best of these is printed: whatever else the machine does can only add."""


def microseconds(batch_size: int, max_staleness: int, slots: int) -> float:
    """Mean CPU time of a reserve or occupy; take and publish, once a batch, are included in it."""
    rng = random.Random(0)
    ledger = Ledger(batch_size=batch_size, max_staleness=max_staleness, slots_per_buffer=slots)
    in_flight: list[str] = []
    spent = 0.0
    operations = admitted = 0
    clock = time.process_time
    while operations < _OPERATIONS:
        new = [f"group-{admitted + index:07}" for index in range(ledger.capacity())]
        admitted += len(new)
        in_flight += new
        rng.shuffle(in_flight)
        chosen = max(1, min(len(in_flight), batch_size // 2))
        finishing, in_flight = in_flight[:chosen], in_flight[chosen:]
        begin = clock()
        for group_id in new:
            ledger.reserve(group_id)
        for group_id in finishing:
            ledger.occupy(group_id)
        if ledger.take():
            ledger.publish(ledger.version + 1)
        spent += clock() - begin
        operations += len(new) + len(finishing)
        gone = set(ledger.collect_surplus())
        in_flight = [group_id for group_id in in_flight if group_id not in gone]
    return spent / operations * 1e6


def main() -> None:
    print("microseconds of CPU an operation; columns: max_staleness")
    bounds = (0, 1, 4)
    print(f"{'B':>6} {'slots':>6} " + " ".join(f"{bound:>6}" for bound in bounds))
    for batch_size in (4, 64, 1024):
        for slots in (batch_size, batch_size * 5 // 4):
            best = (min(microseconds(batch_size, bound, slots) for _ in range(_REPEATS)) for bound in bounds)
            print(f"{batch_size:>6} {slots:>6} " + " ".join(f"{cost:6.2f}" for cost in best), flush=True)


if __name__ == "__main__":
    main()
