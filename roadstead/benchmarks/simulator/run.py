"""One run from names and numbers: what experiments and the command line call.

Owns: putting the parts together. Never touches: files, terminals.
"""

from __future__ import annotations

from collections.abc import Callable

from roadstead.benchmarks.simulator.costs import Costs
from roadstead.benchmarks.simulator.policies import POLICIES
from roadstead.benchmarks.simulator.report import WARMUP, Report
from roadstead.benchmarks.simulator.simulation import Setup, Simulation
from roadstead.benchmarks.simulator.workload import Trace

BATCH_SIZE = 16
"""Groups, as in the post."""


def simulate(
    policy: str,
    max_staleness: int,
    trace: Trace,
    costs: Costs,
    *,
    seed: int = 0,
    batches: int = 40,
    batch_size: int = BATCH_SIZE,
    setup: Setup | None = None,
    warmup: int = WARMUP,
    on_batch: Callable[[], None] = lambda: None,
) -> Report:
    """Simulate `warmup` + `batches` batches, report on the latter. Raises ValueError, Stalled."""
    setup = setup or Setup()
    simulation = Simulation(POLICIES[policy](batch_size, max_staleness), trace, costs, setup, seed)
    trained = simulation.run(warmup + batches, on_batch)
    return Report.of(
        trained,
        policy=policy,
        max_staleness=max_staleness,
        trace=trace.name,
        seed=seed,
        setup=setup,
        warmup=warmup,
    )
