"""Many runs as one table: means, spreads, and who wins.

Owns: the statistics over seeds. Never touches: single runs, files, terminals.
Invariant: a ratio is taken seed by seed, on the same groups in the same order, before it is averaged; a difference of
less than two standard errors of that mean, or of less than one in a thousand, is a tie.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev
from typing import Any

from roadstead.benchmarks.simulator.report import Report
from roadstead.staleness import AgeStatistics

OURS = "reserve_occupy"
_TIE = 2.0
"""Standard errors: about 95 % of a normal law."""

_NEGLIGIBLE = 0.001
"""Where runs are nearly the same seed by seed, a fraction of a second is "significant" and means nothing."""


@dataclass(frozen=True)
class Spread:
    mean: float
    sd: float
    """Standard deviation over seeds, 0 with one seed."""

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(mean(values), stdev(values) if len(values) > 1 else 0.0)


@dataclass(frozen=True)
class Ratio:
    """Ours over the rival's, so that more than 1 is better for us."""

    mean: float
    sd: float
    seeds: int

    @property
    def verdict(self) -> str:
        """wins, ties or loses; a single seed decides nothing."""
        if self.seeds < 2:
            return "one seed"
        margin = max(_NEGLIGIBLE, _TIE * self.sd / sqrt(self.seeds))
        if abs(self.mean - 1) <= margin:
            return "ties"
        return "wins" if self.mean > 1 else "loses"


@dataclass(frozen=True)
class Row:
    """One policy under one bound, over seeds."""

    policy: str
    max_staleness: int
    seeds: int
    throughput: Spread
    batch_seconds: Spread
    discarded: Spread
    masked: Spread
    waste: Spread
    trainer_utilisation: Spread
    engine_utilisation: Spread
    mean_length: Spread
    ages: AgeStatistics
    """Of all seeds together."""
    in_throughput: Ratio | None
    """Ours over this one, in effective tokens a second; None for ours, or without ours."""
    in_time: Ratio | None
    """This one's seconds a batch over ours."""

    def to_json(self) -> dict[str, Any]:
        spreads = ("throughput", "batch_seconds", "discarded", "masked", "waste", "trainer_utilisation")
        return {
            "policy": self.policy,
            "max_staleness": self.max_staleness,
            "seeds": self.seeds,
            **{
                name: {"mean": getattr(self, name).mean, "sd": getattr(self, name).sd}
                for name in (*spreads, "engine_utilisation", "mean_length")
            },
            "age": {
                "max": self.ages.maximum,
                "p99": self.ages.p99,
                "mean": self.ages.mean,
                "histogram": dict(self.ages.histogram),
            },
            "ours_over_this": {
                name: None if ratio is None else {"mean": ratio.mean, "sd": ratio.sd, "verdict": ratio.verdict}
                for name, ratio in (("throughput", self.in_throughput), ("time", self.in_time))
            },
        }


def compare(reports: Iterable[Report]) -> list[Row]:
    """One row for each (max_staleness, policy), in the order in which they come."""
    runs: dict[tuple[int, str], dict[int, Report]] = defaultdict(dict)
    for report in reports:
        runs[report.max_staleness, report.policy][report.seed] = report
    return [_row(policy, bound, by_seed, runs.get((bound, OURS))) for (bound, policy), by_seed in runs.items()]


def _row(policy: str, bound: int, runs: dict[int, Report], ours: dict[int, Report] | None) -> Row:
    def spread(value: Callable[[Report], float]) -> Spread:
        return Spread.of(value(run) for run in runs.values())

    def ratio(value: Callable[[Report, Report], float]) -> Ratio | None:
        if ours is None or policy == OURS:
            return None
        over_seeds = Spread.of(value(ours[seed], run) for seed, run in runs.items() if seed in ours)
        return Ratio(over_seeds.mean, over_seeds.sd, len(runs))

    rows = ((age, 0, True) for run in runs.values() for age, count in run.ages.histogram for _ in range(count))
    return Row(
        policy=policy,
        max_staleness=bound,
        seeds=len(runs),
        throughput=spread(lambda run: run.throughput),
        batch_seconds=spread(lambda run: run.batch_seconds),
        discarded=spread(lambda run: run.discarded),
        masked=spread(lambda run: run.masked),
        waste=spread(lambda run: run.waste),
        trainer_utilisation=spread(lambda run: run.trainer_utilisation),
        engine_utilisation=spread(lambda run: run.engine_utilisation),
        mean_length=spread(lambda run: run.mean_length),
        ages=AgeStatistics.of(rows),
        in_throughput=ratio(lambda our, run: our.throughput / run.throughput),
        in_time=ratio(lambda our, run: run.batch_seconds / our.batch_seconds),
    )
