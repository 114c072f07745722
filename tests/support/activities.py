"""Activities that do their work in memory, for tests of the workflows alone.

Their real counterparts run in test_run.py on real servers. The reserve, occupy and release activities are the real
ones: they are the protocol under test.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from temporalio import activity
from temporalio.exceptions import ApplicationError

from roadstead.storage.references import StagedGroup, group_id
from roadstead.workflows.messages import (
    AttemptClose,
    BatchOrder,
    CommittedBatch,
    DeadLetterOrder,
    GroupOrder,
    PublishOrder,
    StepSummary,
    TrainedStep,
    TrainOrder,
)


def no_delay(_: GroupOrder) -> float:
    return 0.0


@dataclass
class World:
    """What the activities of one run did: the data that a test looks at."""

    generation_s: Callable[[GroupOrder], float] = no_delay
    training_s: float = 0.0
    broken: Callable[[GroupOrder], bool] = lambda order: False
    failing_step: int | None = None
    lag: Callable[[GroupOrder], int] = lambda order: 0
    """Versions by which the engine lags behind the admission."""
    filtered: Callable[[GroupOrder], str | None] = lambda order: None
    note: Callable[[GroupOrder], str | None] = lambda order: None
    """Why the group is not trainable."""
    cancelled: set[str] = field(default_factory=set)
    """Groups whose generation was ended from outside."""
    dead_letters: dict[str, str] = field(default_factory=dict)
    version: int = 0
    batches: dict[int, BatchOrder] = field(default_factory=dict)
    generated: Counter[str] = field(default_factory=Counter)
    trained: Counter[int] = field(default_factory=Counter)
    admitted_under: dict[str, int] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)
    closed: list[AttemptClose] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)

    @activity.defn
    async def rollout_group(self, order: GroupOrder) -> StagedGroup:
        group = group_id(order.position)
        self.admitted_under[group] = order.version
        self.started.set()
        if self.broken(order):
            raise ApplicationError("the environment is broken", type="BadRequest", non_retryable=True)
        seconds = self.generation_s(order)
        try:
            while seconds > 0:  # in small steps, so that a cancellation is noticed
                activity.heartbeat()
                await asyncio.sleep(min(0.1, seconds))
                seconds -= 0.1
        except asyncio.CancelledError:
            self.cancelled.add(group)
            raise
        self.generated[group] += 1
        oldest = order.version - self.lag(order)
        return StagedGroup(
            group_id=group,
            attempt=order.attempt,
            digest=f"digest-of-{group}",
            trajectories=4,
            tokens=40,
            oldest_version=oldest,
            newest_version=max(oldest, self.version),
            mean_reward=0.5,
            filtered=self.filtered(order),
            trainable=self.note(order) is None,
            note=self.note(order),
        )

    @activity.defn
    async def record_dead_letter(self, order: DeadLetterOrder) -> None:
        self.dead_letters[group_id(order.group.position)] = order.reason

    @activity.defn
    async def persist_batch(self, order: BatchOrder) -> CommittedBatch:
        there = self.batches.setdefault(order.step, order)
        assert there.entries == order.entries, "a repeated order must be the same order"
        return CommittedBatch(
            step=order.step,
            digest=f"batch-{order.step}",
            rows=4 * len(order.entries),
            response_tokens=40 * len(order.entries),
            max_staleness=max(order.step - entry.v_traj for entry in order.entries),
            mean_reward=0.5,
        )

    @activity.defn
    async def train_step(self, order: TrainOrder) -> TrainedStep:
        if order.step == self.failing_step:
            raise ApplicationError("the trainer says no", type="TrainerBadBatch", non_retryable=True)
        await asyncio.sleep(self.training_s)
        self.trained[order.step] += 1
        return TrainedStep(
            step=order.step, weights_digest=f"w{order.step + 1}", loss=0.1, grad_norm=1.0, applied=True, seconds={}
        )

    @activity.defn
    async def publish_weights(self, order: PublishOrder) -> StepSummary:
        self.version = max(self.version, order.batch.step + 1)
        return StepSummary(
            step=order.batch.step,
            rows=order.committed.rows,
            response_tokens=order.committed.response_tokens,
            max_staleness=order.committed.max_staleness,
            mean_reward=order.committed.mean_reward,
            loss=0.1,
            grad_norm=1.0,
            applied=True,
            weights_digest=f"w{order.batch.step + 1}",
        )

    @activity.defn
    async def save_checkpoint(self, version: int) -> None:
        self.checkpoints.append(version)

    @activity.defn
    async def close_attempt(self, close: AttemptClose) -> None:
        self.closed.append(close)
