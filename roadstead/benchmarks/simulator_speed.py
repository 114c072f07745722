"""CPU seconds of the simulator: `python -m roadstead.benchmarks.simulator_speed`.

Owns: the sizes, and the timing. Never touches: what is simulated; it is the post's load on two engines of 40, S = 1.
Invariant: one core; the seed is fixed, so that two runs time the same events.
A crash leaves: nothing.
"""

from __future__ import annotations

import time

from roadstead.benchmarks.simulator.costs import h20_qwen3_8b
from roadstead.benchmarks.simulator.policies import POLICIES
from roadstead.benchmarks.simulator.run import BATCH_SIZE
from roadstead.benchmarks.simulator.simulation import Setup, Simulation
from roadstead.benchmarks.simulator.workload import synthetic

_SIZES = (1_000, 10_000, 100_000)
_GROUP = 8


def timed(policy: str, trajectories: int) -> tuple[float, int]:
    """CPU seconds and events until so many trajectories are trained (whole batches)."""
    simulation = Simulation(POLICIES[policy](BATCH_SIZE, 1), synthetic(), h20_qwen3_8b(), Setup(), seed=0)
    begin = time.process_time()
    simulation.run(-(-trajectories // (BATCH_SIZE * _GROUP)))
    return time.process_time() - begin, simulation.events


def main() -> None:
    print(f"{'policy':>16} {'trajectories':>13} {'CPU s':>7} {'microseconds each':>18} {'events':>8}")
    cases = [("reserve_occupy", size) for size in _SIZES] + [(name, 10_000) for name in POLICIES]
    for policy, size in cases:
        seconds, events = timed(policy, size)
        print(f"{policy:>16} {size:>13,} {seconds:>7.2f} {seconds / size * 1e6:>18.1f} {events:>8,}", flush=True)


if __name__ == "__main__":
    main()
