"""The train worker: one slot, next to the trainer, whose socket it knows."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path

from temporalio.client import Client
from temporalio.worker import Worker

from roadstead.activities.checkpoint import SaveCheckpoint
from roadstead.activities.train import TrainStep
from roadstead.config import RunConfig
from roadstead.metrics.registry import Metrics
from roadstead.training.client import TrainerClient
from roadstead.workers.host import GRACE, main
from roadstead.workers.local import trainer_socket
from roadstead.workers.trainer_metrics import watches
from roadstead.workflows.options import queue


async def make(
    config: RunConfig, client: Client, folder: Path, metrics: Metrics
) -> tuple[Sequence[Worker], Sequence[Awaitable[None]]]:
    trainer = TrainerClient(trainer_socket(folder))
    worker = Worker(
        client,
        task_queue=queue(config.name, "train"),
        activities=[TrainStep(trainer).train_step, SaveCheckpoint(trainer).save_checkpoint],
        max_concurrent_activities=1,
        graceful_shutdown_timeout=GRACE,
    )
    return [worker], watches(config, trainer_socket(folder), metrics)


if __name__ == "__main__":
    main("train", make)
