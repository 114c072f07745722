"""The numbers of each evaluation, from its summary on S3: a companion of the orchestrator worker.

Owns: the metrics of evaluations. Never touches: samples, the log of training; it only reads.
Invariant: shown is the newest version whose evaluation is closed, and never an older one after it.
A crash leaves: nothing. The next process shows the newest summary again.
"""

from __future__ import annotations

import asyncio

import structlog

from roadstead.metrics import catalogue
from roadstead.metrics.registry import Metrics
from roadstead.storage import evals
from roadstead.storage.evals import EvaluationSummary
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore

_LOOK_S = 5.0
"""A look is a listing; evaluations come every few steps."""

log = structlog.get_logger(__name__)


class EvaluationWatch:
    def __init__(self, store: ObjectStore, keys: RunKeys, metrics: Metrics) -> None:
        self._store, self._keys, self._metrics = store, keys, metrics
        self._shown = -1

    async def run(self) -> None:
        """Look until cancelled. Raises nothing: a look that fails is counted, and there is another."""
        while True:
            try:
                await asyncio.to_thread(self.look)
            except Exception as error:  # whatever it is, the run must not notice
                self._metrics.add(catalogue.WATCH_ERRORS, source="records")
                log.warning("metrics.evaluations_not_read", error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(_LOOK_S)

    def look(self) -> None:
        """Show the newest summary that was not shown yet. Raises StoreError."""
        versions = (int(name.removeprefix("v=")) for name in self._store.folders(self._keys.evals))
        for version in sorted((v for v in versions if v > self._shown), reverse=True):
            summary = evals.find(self._store, self._keys, version)
            if summary is not None:
                self._show(summary)
                return

    def _show(self, summary: EvaluationSummary) -> None:
        metrics = self._metrics
        if summary.mean_reward is not None:
            metrics.set(catalogue.EVALUATION_REWARD_MEAN, summary.mean_reward)
        metrics.set(catalogue.EVALUATION_MISSING, summary.settings.prompts - summary.evaluated)
        metrics.set(catalogue.EVALUATION_SECONDS, summary.seconds)
        # Last, so that whoever sees the number sees the values that belong to it.
        metrics.set(catalogue.EVALUATION_VERSION, summary.version)
        self._shown = summary.version
