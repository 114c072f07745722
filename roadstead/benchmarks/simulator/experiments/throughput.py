"""What the bound costs: `python -m roadstead.benchmarks.simulator.experiments.throughput`

Owns: the post's second experiment, with seeds enough to say who wins: S = 1, 2, 3, two loads, all policies.
Invariant: for a seed, all policies draw the same groups in the same order, on the same machines.
"""

from __future__ import annotations

import argparse

from roadstead.benchmarks.simulator.comparison import Row, compare
from roadstead.benchmarks.simulator.costs import Costs, h20_qwen3_8b
from roadstead.benchmarks.simulator.policies import POLICIES
from roadstead.benchmarks.simulator.report import WARMUP
from roadstead.benchmarks.simulator.run import simulate
from roadstead.benchmarks.simulator.simulation import Setup
from roadstead.benchmarks.simulator.workload import Trace, synthetic

BOUNDS = (1, 2, 3)
SEEDS = 20
BATCHES = 40


def measure(
    trace: Trace,
    *,
    costs: Costs | None = None,
    setup: Setup | None = None,
    bounds: tuple[int, ...] = BOUNDS,
    policies: tuple[str, ...] = tuple(POLICIES),
    seeds: int = SEEDS,
    batches: int = BATCHES,
    warmup: int = WARMUP,
) -> list[Row]:
    """Rows by bound, then policy."""
    costs = costs or h20_qwen3_8b()
    return compare(
        simulate(policy, bound, trace, costs, seed=seed, batches=batches, setup=setup, warmup=warmup)
        for bound in bounds
        for policy in policies
        for seed in range(seeds)
    )


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| S | policy | tokens/s | s a batch | discarded, M tokens | waste | trainer busy | engines busy | "
        "mean length | age max, p99, mean | tokens/s: ours / this | time: this / ours |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratios = [
            "" if ratio is None else f"{ratio.mean:.3f} ± {ratio.sd:.3f}, {ratio.verdict}"
            for ratio in (row.in_throughput, row.in_time)
        ]
        lines.append(
            f"| {row.max_staleness} | {row.policy} | {row.throughput.mean:.0f} ± {row.throughput.sd:.0f} "
            f"| {row.batch_seconds.mean:.0f} ± {row.batch_seconds.sd:.0f} "
            f"| {row.discarded.mean / 1e6:.1f} ± {row.discarded.sd / 1e6:.1f} | {row.waste.mean:.1%} "
            f"| {row.trainer_utilisation.mean:.0%} | {row.engine_utilisation.mean:.0%} | {row.mean_length.mean:.0f} "
            f"| {row.ages.maximum}, {row.ages.p99}, {row.ages.mean:.2f} | {ratios[0]} | {ratios[1]} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--batches", type=int, default=BATCHES, help=f"measured, after {WARMUP} of warm-up")
    given = parser.parse_args()
    for trace in (synthetic(), synthetic(long_tail=True)):
        print(f"\n{trace.name} load, {given.seeds} seeds, {given.batches} batches; ± is the standard deviation\n")
        print(table(measure(trace, seeds=given.seeds, batches=given.batches)), flush=True)


if __name__ == "__main__":
    main()
