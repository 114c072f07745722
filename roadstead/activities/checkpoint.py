"""save_checkpoint: the trainer's state at the version where an attempt ends in order.

Invariant: idempotent; a checkpoint of that version that is complete already is the answer.
A crash leaves: files without a marker. The run is whole without it: a resume replays from the one before.
"""

from __future__ import annotations

from temporalio import activity

from roadstead.activities.working import beating
from roadstead.training.client import TrainerClient


class SaveCheckpoint:
    def __init__(self, trainer: TrainerClient) -> None:
        self._trainer = trainer

    @activity.defn
    async def save_checkpoint(self, version: int) -> None:
        timeout = activity.info().start_to_close_timeout
        assert timeout is not None, "set in workflows/options.py"
        async with beating():
            await self._trainer.checkpoint(version, deadline_s=timeout.total_seconds())
