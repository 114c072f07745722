"""train_step: commands the trainer to train exactly one committed batch.

Invariant: idempotent by (step, batch digest): the trainer answers a step it has done from its record on S3.
A crash leaves: a trainer that goes on; the next execution joins it.
"""

from __future__ import annotations

from temporalio import activity

from roadstead.activities.working import beating
from roadstead.training.client import TrainerClient
from roadstead.workflows.messages import TrainedStep, TrainOrder


class TrainStep:
    def __init__(self, trainer: TrainerClient) -> None:
        self._trainer = trainer

    @activity.defn
    async def train_step(self, order: TrainOrder) -> TrainedStep:
        status: dict[str, object] = {}
        async with beating(lambda: status):
            timeout = activity.info().start_to_close_timeout
            assert timeout is not None, "set in workflows/options.py"
            result, seconds = await self._trainer.train(
                order.step, order.digest, status.update, deadline_s=timeout.total_seconds()
            )
        if result.metrics.not_finite:
            activity.logger.warning(f"step {order.step}: a gradient was not finite, its optimizer step was skipped")
        return TrainedStep(
            step=result.step,
            weights_digest=result.weights.digest,
            loss=result.metrics.loss,
            grad_norm=result.metrics.grad_norm,
            applied=result.metrics.applied,
            seconds=seconds,
        )
