"""Is the bound ever exceeded? `python -m roadstead.benchmarks.simulator.experiments.correctness`

Owns: the post's first experiment: S = 0..5, two loads, 100 batches each, 16 groups of 8, two engines of 40.
Invariant: what is checked is what was trained: each batch's versions at admission, and its tokens' versions.
"""

from __future__ import annotations

from dataclasses import dataclass

from roadstead.benchmarks.simulator.costs import h20_qwen3_8b
from roadstead.benchmarks.simulator.policies import POLICIES
from roadstead.benchmarks.simulator.run import BATCH_SIZE
from roadstead.benchmarks.simulator.simulation import Setup, Simulation
from roadstead.benchmarks.simulator.workload import Trace, synthetic

BOUNDS = range(6)
BATCHES = 100


@dataclass(frozen=True)
class Outcome:
    batches: int
    full: int
    """Batches with all their groups and trajectories, none of which was in another batch."""
    over: int
    """Batches with a group admitted, or a token made, more than max_staleness versions before."""
    max_age: int
    discarded: int


def check(trace: Trace, max_staleness: int, batches: int = BATCHES, policy: str = "reserve_occupy") -> Outcome:
    """Run and check; groups have 8 members in the post's traces."""
    simulation = Simulation(POLICIES[policy](BATCH_SIZE, max_staleness), trace, h20_qwen3_8b(), Setup(), seed=0)
    seen: set[int] = set()
    full = over = oldest = 0
    for batch in simulation.run(batches):
        fresh = set(batch.groups) - seen
        seen |= fresh
        full += len(fresh) == BATCH_SIZE and batch.trajectories == sum(batch.ages.values()) == 8 * BATCH_SIZE
        age = max(batch.step - min(batch.versions), *batch.ages)
        over += age > max_staleness
        oldest = max(oldest, age)
    return Outcome(batches, full, over, oldest, simulation.discarded_tokens)


def main() -> None:
    print(f"{'load':>10} {'S':>3} {'batches':>8} {'full':>6} {'over the bound':>15} {'max age':>8} {'discarded':>10}")
    total = full = over = 0
    for trace in (synthetic(), synthetic(long_tail=True)):
        for bound in BOUNDS:
            found = check(trace, bound)
            total, full, over = total + found.batches, full + found.full, over + found.over
            print(
                f"{trace.name:>10} {bound:>3} {found.batches:>8} {found.full:>6} {found.over:>15} "
                f"{found.max_age:>8} {found.discarded:>10}"
            )
    print(f"{full} of {total} batches full, {over} over the bound")


if __name__ == "__main__":
    main()
