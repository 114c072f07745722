"""The ledger worker: the bridge from activities to the run's Updates. Exactly one a run."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path

from temporalio.client import Client
from temporalio.worker import Worker

from roadstead.activities.occupy import OccupySlot
from roadstead.activities.release import ReleaseSlot
from roadstead.activities.reserve import ReserveSlots
from roadstead.activities.run_handle import RunHandle
from roadstead.config import RunConfig
from roadstead.metrics.registry import Metrics
from roadstead.workers.host import GRACE, main
from roadstead.workflows.options import queue

_UPDATES = 8
"""Temporal allows 10 Updates in flight a workflow and does not degrade gracefully beyond (live-lock at 64)."""


async def make(
    config: RunConfig, client: Client, folder: Path, metrics: Metrics
) -> tuple[Sequence[Worker], Sequence[Awaitable[None]]]:
    run = RunHandle(client, config.name)
    worker = Worker(
        client,
        task_queue=queue(config.name, "ledger"),
        activities=[
            ReserveSlots(run).reserve_slots,
            OccupySlot(run).occupy_slot,
            ReleaseSlot(run).release_slot,
        ],
        max_concurrent_activities=_UPDATES,
        graceful_shutdown_timeout=GRACE,
    )
    return [worker], []


if __name__ == "__main__":
    main("ledger", make)
