"""The orchestrator worker: workflows, and the activities that only need S3."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path

from temporalio.client import Client
from temporalio.worker import Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from roadstead.activities.close import CloseAttempt
from roadstead.activities.persist import PersistBatch
from roadstead.activities.publish import PublishWeights
from roadstead.config import RunConfig
from roadstead.metrics.registry import Metrics
from roadstead.storage.open import open_run
from roadstead.workers.evaluation import closing_activities
from roadstead.workers.host import GRACE, STICKY, main
from roadstead.workers.run_metrics import watches
from roadstead.workers.timed_store import TimedStore
from roadstead.workers.tracking import trackers
from roadstead.workflows.evaluation import Evaluation
from roadstead.workflows.options import queue
from roadstead.workflows.training_run import TrainingRun
from roadstead.workflows.training_step import TrainingStep

_ACTIVITIES = 8
"""Persisting and publishing: two batches' worth of memory and store connections each."""


async def make(
    config: RunConfig, client: Client, folder: Path, metrics: Metrics
) -> tuple[Sequence[Worker], Sequence[Awaitable[None]]]:
    store, keys = open_run(config)
    worker = Worker(
        client,
        task_queue=queue(config.name, "orchestrator"),
        workflows=[TrainingRun, TrainingStep, Evaluation],
        activities=[
            PersistBatch(config, TimedStore(store.address, metrics), keys).persist_batch,
            PublishWeights(store, keys).publish_weights,
            CloseAttempt(store, keys).close_attempt,
            *closing_activities(config, store, keys),
        ],
        workflow_runner=runner(),
        max_concurrent_activities=_ACTIVITIES,
        sticky_queue_schedule_to_start_timeout=STICKY,
        graceful_shutdown_timeout=GRACE,
    )
    beside = [*trackers(config, store, keys, folder), *watches(config, client, store, keys, metrics)]
    return [worker], beside


def runner() -> SandboxedWorkflowRunner:
    """Our own modules pass through: they are deterministic by their own tests, and importing them costs once."""
    return SandboxedWorkflowRunner(
        restrictions=SandboxRestrictions.default.with_passthrough_modules("roadstead", "pydantic", "numpy", "pyarrow")
    )


if __name__ == "__main__":
    main("orchestrator", make)
