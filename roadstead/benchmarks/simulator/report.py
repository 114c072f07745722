"""What a run came to: one row of numbers from its trained batches.

Owns: the definitions of the numbers. Never touches: a running simulation.
Invariant: rates count only what happened after the warm-up, between two publications: whole batches over the time they
took, so that no policy gains by what it leaves unfinished at the end except what it always has in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roadstead.benchmarks.simulator.simulation import Setup, TrainedBatch
from roadstead.staleness import AgeStatistics

WARMUP = 25
"""Batches left out of the rates. All groups start at once, and the long and short batches that follow alternate for
about 20 batches with S = 1 (measured: the lead of one rule over another that trains the same batches is constant from
then on). With fewer, a rule that is quick at the start seems slow after it."""


@dataclass(frozen=True)
class Report:
    policy: str
    max_staleness: int
    trace: str
    seed: int
    batches: int
    """Measured, the warm-up not counted."""
    seconds: float
    """Simulated, of the measured batches."""
    tokens: int
    """Response tokens that the loss saw."""
    mean_length: float
    """Response tokens a trained trajectory. Below the trace's mean: the rule trains on shorter ones than it drew."""
    discarded: int
    """Response tokens generated for groups that were dropped."""
    masked: int
    """Response tokens trained over, masked out of the loss."""
    trainer_utilisation: float
    """Training time over time."""
    engine_utilisation: float
    """Decoding slots in use over slots."""
    ages: AgeStatistics
    """Of trained trajectories: step minus oldest version among the tokens that the loss saw."""

    @property
    def throughput(self) -> float:
        """Effective: response tokens that the loss saw, a second."""
        return self.tokens / self.seconds

    @property
    def batch_seconds(self) -> float:
        return self.seconds / self.batches

    @property
    def waste(self) -> float:
        """Discarded and masked tokens over all tokens that came to an end."""
        lost = self.discarded + self.masked
        return lost / (lost + self.tokens) if lost else 0.0

    @classmethod
    def of(
        cls,
        batches: list[TrainedBatch],
        *,
        policy: str,
        max_staleness: int,
        trace: str,
        seed: int,
        setup: Setup,
        warmup: int = WARMUP,
    ) -> Report:
        """Raises ValueError when nothing is left after the warm-up."""
        if len(batches) <= warmup:
            raise ValueError(f"batches: {len(batches)} with a warm-up of {warmup} leaves none to measure; run more")
        begin = batches[warmup - 1] if warmup else None
        measured, end = batches[warmup:], batches[-1]
        seconds = end.published - (begin.published if begin else 0.0)
        slots = setup.engines * setup.concurrency
        return cls(
            policy=policy,
            max_staleness=max_staleness,
            trace=trace,
            seed=seed,
            batches=len(measured),
            seconds=seconds,
            tokens=sum(batch.tokens for batch in measured),
            mean_length=sum(b.tokens + b.masked for b in measured) / sum(b.trajectories for b in measured),
            discarded=end.discarded - (begin.discarded if begin else 0),
            masked=sum(batch.masked for batch in measured),
            trainer_utilisation=sum(batch.train_seconds for batch in measured) / seconds,
            engine_utilisation=(end.occupied - (begin.occupied if begin else 0.0)) / (slots * seconds),
            ages=AgeStatistics.of(
                (batch.step, batch.step - age, True)
                for batch in measured
                for age, count in batch.ages.items()
                for _ in range(count)
            ),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "max_staleness": self.max_staleness,
            "trace": self.trace,
            "seed": self.seed,
            "batches": self.batches,
            "seconds": self.seconds,
            "tokens_per_second": self.throughput,
            "batch_seconds": self.batch_seconds,
            "tokens": self.tokens,
            "mean_length": self.mean_length,
            "discarded_tokens": self.discarded,
            "masked_tokens": self.masked,
            "waste": self.waste,
            "trainer_utilisation": self.trainer_utilisation,
            "trainer_idle": 1 - self.trainer_utilisation,
            "engine_utilisation": self.engine_utilisation,
            "age_max": self.ages.maximum,
            "age_p99": self.ages.p99,
            "age_mean": self.ages.mean,
            "age_histogram": dict(self.ages.histogram),
        }
