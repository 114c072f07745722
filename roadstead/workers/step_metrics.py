"""The numbers of each training step, from what lies on S3: a companion of the orchestrator worker.

Owns: the metrics with the label `attempt`, and the counters of what was trained. Never touches: the log; it only reads.
Invariant: a step's numbers are those of its batch as it was trained and of its record, not of a counter. A resume that
goes back some steps begins series of its own: no value of an earlier attempt is overwritten.
A crash leaves: nothing. The next process shows the last recorded step again, and counts from the next one on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import structlog

from roadstead.config import RunConfig
from roadstead.metrics import catalogue
from roadstead.metrics.catalogue import Metric
from roadstead.metrics.registry import Metrics
from roadstead.storage import batches, runs, steps
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectMissing, ObjectStore
from roadstead.storage.steps import StepRecord

_LOOK_S = 1.0

log = structlog.get_logger(__name__)


class StepNumbers:
    """From a step record and its batch's scalars to values of metrics."""

    def __init__(self, config: RunConfig, metrics: Metrics) -> None:
        self._metrics, self._bound = metrics, config.staleness.max_staleness
        self._group_size = config.rollout.group_size

    def show(self, record: StepRecord, stats: pa.Table, *, count: bool = True) -> None:
        """stats: the batch's scalars (storage.schema.STATS_COLUMNS). count: False when it was counted before."""
        attempt = str(record.attempt)
        self._batch(record, stats, attempt)
        self._training(record, attempt)
        if count:
            self._count(record, stats)
        # Last, so that whoever sees the number sees the values that belong to it.
        self._metrics.set(catalogue.STEP, record.step, attempt=attempt)

    def _batch(self, record: StepRecord, stats: pa.Table, attempt: str) -> None:
        rewards, advantages, ages = _column(stats, "reward"), _column(stats, "advantage"), _ages(stats)
        filtered = Counter(record.terminal.values())["filtered"] * self._group_size
        trainable = int((np.isfinite(rewards) & np.isfinite(advantages) & (advantages != 0)).sum())
        values: dict[Metric, float] = {
            catalogue.BATCH_TRAJECTORIES: record.rows,
            catalogue.BATCH_TOKENS: record.response_tokens,
            catalogue.BATCH_TRAINABLE: trainable / (record.rows + filtered),
            catalogue.BATCH_REWARD_MEAN: _mean(rewards),
            catalogue.BATCH_REWARD_STDDEV: _stddev(rewards),
            catalogue.BATCH_ADVANTAGE_MEAN: _mean(advantages),
            catalogue.BATCH_ADVANTAGE_STDDEV: _stddev(advantages),
            catalogue.BATCH_AGE_MEAN: _mean(ages),
            catalogue.BATCH_AGE_MAX: float(ages.max()) if ages.size else np.nan,
            # Nearest rank, as AgeStatistics has it: an age that some trajectory has.
            catalogue.BATCH_AGE_P99: float(np.percentile(ages, 99, method="inverted_cdf")) if ages.size else np.nan,
        }
        for metric, value in values.items():
            self._metrics.set(metric, value, attempt=attempt)

    def _training(self, record: StepRecord, attempt: str) -> None:
        found = record.metrics
        values: dict[Metric, float | None] = {
            catalogue.TRAIN_LOSS: found.loss,
            catalogue.TRAIN_GRAD_NORM: found.grad_norm,
            catalogue.TRAIN_LEARNING_RATE: found.learning_rate,
            catalogue.TRAIN_RATIO_MEAN: found.importance_mean,
            catalogue.TRAIN_RATIO_MAX: found.importance_max,
            catalogue.TRAIN_CAPPED: found.capped_share,
            catalogue.TRAIN_CLIPPED: found.clip_share,
            catalogue.TRAIN_KL_BEHAVIOR: found.kl_to_behavior,
            catalogue.TRAIN_KL_REFERENCE: found.kl_to_reference,
            catalogue.TRAIN_ENTROPY: found.entropy,
        }
        for metric, value in values.items():
            self._metrics.set(metric, np.nan if value is None else value, attempt=attempt)

    def _count(self, record: StepRecord, stats: pa.Table) -> None:
        metrics, ages = self._metrics, _ages(stats)
        for age in ages:
            metrics.observe(catalogue.TRAINED_AGE, float(age))
        metrics.add(catalogue.OVER_BOUND, int((ages > self._bound).sum()))
        metrics.add(catalogue.TOKENS_TRAINED, record.response_tokens)
        metrics.add(catalogue.STEPS_SKIPPED, not record.metrics.applied)
        metrics.add(catalogue.STEPS_CLIPPED, record.metrics.grad_clipped)


class StepWatch:
    """Shows every step that is recorded while it watches, in order."""

    def __init__(
        self, store: ObjectStore, keys: RunKeys, numbers: StepNumbers, attempt: Callable[[], int | None]
    ) -> None:
        """attempt: the run's, as far as known; another one may have gone back some steps."""
        self._store, self._keys, self._numbers, self._attempt_now = store, keys, numbers, attempt
        self._next: int | None = None
        self._attempt: int | None = None

    async def run(self, metrics: Metrics) -> None:
        """Look until cancelled. Raises nothing: a look that fails is counted, and there is another."""
        while True:
            try:
                await asyncio.to_thread(self.look)
            except Exception as error:  # whatever it is, the run must not notice
                metrics.add(catalogue.WATCH_ERRORS, source="records")
                log.warning("metrics.steps_not_read", run=self._keys.run_id, error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(_LOOK_S)

    def look(self) -> None:
        """Show what was recorded since the last look. Raises StoreError."""
        attempt = self._attempt_now()
        if self._next is None:
            self._next = steps.count(self._store, self._keys)
            if self._next > 0 and (last := steps.find(self._store, self._keys, self._next - 1)) is not None:
                self._show(last, count=False)
        elif attempt != self._attempt and (known := runs.attempts(self._store, self._keys)):
            self._next = min(self._next, known[-1].from_version)
        self._attempt = attempt
        while (record := steps.find(self._store, self._keys, self._next)) is not None:
            self._show(record)
            self._next += 1

    def _show(self, record: StepRecord, *, count: bool = True) -> None:
        commit = batches.find(self._store, self._keys, record.step)
        if commit is None:
            raise ObjectMissing(f"step {record.step} is recorded and has no batch: {self._store.url(self._keys.root)}")
        self._numbers.show(record, batches.read_stats(self._store, commit), count=count)


def _column(stats: pa.Table, name: str) -> np.ndarray:
    """[rows] float64, NaN for null."""
    return np.array([np.nan if value is None else value for value in stats[name].to_pylist()], dtype=np.float64)


def _ages(stats: pa.Table) -> np.ndarray:
    """Versions, of the rows that the running policy made: others have no meaningful age."""
    live = np.array(stats["from_live_policy"].to_pylist(), dtype=bool)
    ages: np.ndarray = _column(stats, "staleness")[live]
    return ages


def _mean(values: np.ndarray) -> float:
    some = values[np.isfinite(values)]
    return float(some.mean()) if some.size else float("nan")


def _stddev(values: np.ndarray) -> float:
    some = values[np.isfinite(values)]
    return float(some.std()) if some.size else float("nan")
