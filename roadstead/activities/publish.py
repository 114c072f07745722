"""publish_weights: makes a trained step public, then records it.

Invariant: manifest, then the LATEST hint, then the step record, LAST. A version without a manifest is not loaded by
any engine; a step without a record did not happen.
"""

from __future__ import annotations

from temporalio import activity

from roadstead.activities.working import in_thread
from roadstead.storage import runs, steps, train_rows, weights
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectMissing, ObjectStore
from roadstead.storage.steps import StepRecord
from roadstead.workflows.messages import PublishOrder, StepSummary


class PublishWeights:
    def __init__(self, store: ObjectStore, keys: RunKeys) -> None:
        self._store, self._keys = store, keys

    @activity.defn
    async def publish_weights(self, order: PublishOrder) -> StepSummary:
        return await in_thread(self._publish, order)

    def _publish(self, order: PublishOrder) -> StepSummary:
        batch, committed = order.batch, order.committed
        runs.check_current(self._store, self._keys, batch.attempt)
        result = train_rows.find(self._store, self._keys, batch.step, committed.digest)
        if result is None:
            raise ObjectMissing(
                f"step {batch.step}: no train result for batch {committed.digest}; it was reported as trained"
            )
        parent = weights.manifest_of(self._store, self._keys, batch.step)
        manifest = weights.publish(
            self._store, self._keys, result.weights, parent=parent, batch_digest=committed.digest
        )
        steps.write(
            self._store,
            self._keys,
            StepRecord(
                run_id=self._keys.run_id,
                attempt=batch.attempt,
                step=batch.step,
                batch_digest=committed.digest,
                weights_in=parent.digest,
                weights_out=manifest.digest,
                rows=committed.rows,
                response_tokens=committed.response_tokens,
                max_staleness=committed.max_staleness,
                mean_reward=committed.mean_reward,
                terminal=batch.cut.terminal,
                ledger=batch.cut.ledger,
                cursor=batch.cut.cursor,
                backlog=batch.cut.backlog,
                metrics=result.metrics,
            ),
        )
        runs.check_current(self._store, self._keys, batch.attempt)
        return StepSummary(
            step=batch.step,
            rows=committed.rows,
            response_tokens=committed.response_tokens,
            max_staleness=committed.max_staleness,
            mean_reward=committed.mean_reward,
            loss=result.metrics.loss,
            grad_norm=result.metrics.grad_norm,
            applied=result.metrics.applied,
            weights_digest=manifest.digest,
        )
