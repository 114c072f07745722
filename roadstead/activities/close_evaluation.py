"""close_evaluation: makes one table of an evaluation's samples and puts its numbers on record.

Invariant: the summary is written last, and only by the run's current attempt. A failed evaluation is on record like any
other, with its reasons, and fails nothing.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import pyarrow as pa
import structlog
from temporalio import activity

from roadstead.activities.working import in_thread
from roadstead.storage import evals, runs, weights
from roadstead.storage.evals import EvaluationSettings, EvaluationSummary
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.workflows.evaluation_messages import EvaluationClose

log = structlog.get_logger(__name__)

_UNKNOWN = "its samples are not there, and nobody said why"


class CloseEvaluation:
    def __init__(self, store: ObjectStore, keys: RunKeys, settings: EvaluationSettings) -> None:
        self._store, self._keys, self._settings = store, keys, settings

    @activity.defn
    async def close_evaluation(self, close: EvaluationClose) -> None:
        await in_thread(self._close, close)

    def _close(self, close: EvaluationClose) -> None:
        order, store, keys = close.evaluation, self._store, self._keys
        runs.check_current(store, keys, order.attempt)
        if evals.is_closed(store, keys, order.version):
            return
        samples = evals.staged(store, keys, self._settings, order.version)
        data = evals.put_data(store, keys, pa.concat_tables(samples.values())) if samples else (None, None)
        summary = EvaluationSummary(
            run_id=keys.run_id,
            attempt=order.attempt,
            version=order.version,
            weights_digest=weights.manifest_of(store, keys, order.version).digest,
            settings=self._settings,
            **evals.numbers(samples.values()),
            failures=evals.most_common(self._failures(close, samples)),
            skipped=close.skipped,
            seconds=close.seconds,
            digest=data[0],
            data=data[1],
            closed_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        there = evals.close(store, keys, summary)
        runs.check_current(store, keys, order.attempt)
        _tell(there)

    def _failures(self, close: EvaluationClose, samples: dict[int, pa.Table]) -> Counter[str]:
        missing = (position for position in range(self._settings.prompts) if position not in samples)
        if close.skipped is not None:
            return Counter(close.skipped for _ in missing)
        return Counter(close.failures.get(position - position % close.share, _UNKNOWN) for position in missing)


def _tell(summary: EvaluationSummary) -> None:
    words = {
        "version": summary.version,
        "evaluated": summary.evaluated,
        "prompts": summary.settings.prompts,
        "mean_reward": summary.mean_reward,
        "seconds": round(summary.seconds, 1),
    }
    if summary.complete:
        log.info("evaluation.closed", **words)
    else:
        log.warning("evaluation.incomplete", **words, failures=summary.failures)
