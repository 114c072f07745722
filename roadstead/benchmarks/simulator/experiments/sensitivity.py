"""Does the comparison hang on a guess? `python -m roadstead.benchmarks.simulator.experiments.sensitivity`

Owns: variants of machines, costs and length of run, one thing changed at a time.
Invariant: every variant runs all its policies on the same seeds; the first is that of `throughput`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roadstead.benchmarks.simulator.costs import Costs, h20_qwen3_8b
from roadstead.benchmarks.simulator.experiments.throughput import BOUNDS, measure
from roadstead.benchmarks.simulator.simulation import Setup
from roadstead.benchmarks.simulator.workload import synthetic

SEEDS = 10
RIVALS = ("in_order", "verl_drop", "roll")


def scaled(costs: Costs, factor: float, *names: str) -> Costs:
    return replace(costs, **{name: getattr(costs, name) * factor for name in names})


def variants() -> dict[str, dict[str, Any]]:
    costs = h20_qwen3_8b()
    decode = ("overhead", "weights", "per_sequence", "per_context", "prefill")
    train = ("train", "train_square", "train_fixed")
    return {
        "as in the main table": {},
        "10 batches, no warm-up": {"batches": 10, "warmup": 0},
        "concurrency 20": {"setup": Setup(concurrency=20)},
        "concurrency 80": {"setup": Setup(concurrency=80)},
        "4 engines of 40": {"setup": Setup(engines=4)},
        "decoding twice as fast": {"costs": scaled(costs, 0.5, *decode)},
        "training twice as slow": {"costs": scaled(costs, 2.0, *train)},
        "no partial rollout": {"setup": Setup(partial_rollout=False)},
    }


def main() -> None:
    print("effective tokens/s, ours over the rival's; mean ± standard deviation over", SEEDS, "seeds")
    for trace in (synthetic(), synthetic(long_tail=True)):
        print(f"\n{trace.name} load\n\n| variant | S | ours, tokens/s | trainer busy | {' | '.join(RIVALS)} |")
        print("|---|---|---|---|" + "---|" * len(RIVALS))
        for name, changed in variants().items():
            rows = measure(trace, policies=("reserve_occupy", *RIVALS), seeds=SEEDS, **changed)
            for bound in BOUNDS:
                ours, *rivals = (row for row in rows if row.max_staleness == bound)
                ratios = [row.in_throughput for row in rivals]
                cells = [f"{ratio.mean:.3f} ± {ratio.sd:.3f}, {ratio.verdict}" for ratio in ratios if ratio]
                print(
                    f"| {name} | {bound} | {ours.throughput.mean:.0f} | {ours.trainer_utilisation.mean:.0%} "
                    f"| {' | '.join(cells)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
