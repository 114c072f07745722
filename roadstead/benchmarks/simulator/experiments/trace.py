"""How close the synthetic trace is to the post's: `python -m roadstead.benchmarks.simulator.experiments.trace`

Owns: the comparison of statistics. Never touches: the trace itself, which `workload` builds.
"""

from __future__ import annotations

from roadstead.benchmarks.simulator.workload import POST_STATISTICS, synthetic


def main() -> None:
    original, tail = synthetic().statistics(), synthetic(long_tail=True).statistics()
    print(f"| {'statistic':18} | {'post':>8} | {'original':>8} | {'off':>6} | {'long-tail':>9} |")
    print("|---|---|---|---|---|")
    for key, found in original.items():
        stated = POST_STATISTICS.get(key)
        post, off = ("", "") if stated is None else (f"{stated:.0f}", f"{found / stated - 1:+.1%}")
        print(f"| {key:18} | {post:>8} | {found:>8.0f} | {off:>6} | {tail[key]:>9.0f} |")


if __name__ == "__main__":
    main()
