"""What the trainer computed from a batch: one row a trajectory, and the step's result.

Owns: `batches/step=.../train-<batch digest>.parquet`. Never touches: the batch, the optimizer.
Invariant: the object is the commit marker of a train step: written last, created once, keyed by the digest of
the batch that was trained. Its file metadata holds the `TrainResult`, which has no wall-clock values, so that
training the same batch again on deterministic kernels writes the same bytes.
A crash leaves: nothing (the step is trained again from the last checkpoint) or the whole result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from roadstead.storage.batches import BatchCommit, Frozen
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectCorrupt, ObjectStore
from roadstead.storage.parquet import decode, encode
from roadstead.storage.weights import WeightsRef

_RESULT = b"roadstead.train_result"

TRAIN_SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("member", pa.int32(), nullable=False),
        pa.field("trainer_logprobs", pa.list_(pa.float32()), nullable=False),  # nats, before the update
        # Token by token over the batch's loss mask, whatever the loss made of them: they follow from the logprobs.
        pa.field("importance_mean", pa.float32(), nullable=False),  # exp(trainer - behaviour)
        pa.field("importance_max", pa.float32(), nullable=False),
        pa.field("capped_share", pa.float32(), nullable=False),  # loss tokens whose weight was truncated
        pa.field("kl_to_behavior", pa.float32(), nullable=False),  # mean of behaviour - trainer, nats
        pa.field("loss", pa.float32(), nullable=False),  # this row's share of the step's loss
    ],
    metadata={"roadstead.train_schema_version": "1"},
)


class TrainMetrics(Frozen):
    """Numbers of one step; all over loss tokens unless said otherwise. Fields with a default are null in records
    that are older than they are."""

    loss: float
    """Mean over the mini-batches of each one's loss, the KL term included."""
    grad_norm: float | None
    """Before clipping, the largest of the mini-batches; null when one was not finite; 0 without anything to learn."""
    grad_clipped: bool
    """A norm was over training.max_grad_norm, that gradient was scaled down to it."""
    applied: bool
    """An optimizer step was made. False: the weights did not move, because no gradient was finite (grad_norm is null)
    or nothing had one (trainable_rows is 0)."""
    optimizer_steps: int | None = None
    """Made, of at most training.minibatches: one whose gradient is not finite, or without any, is left out."""
    learning_rate: float
    loss_tokens: int
    masked_over_age: int = 0
    """Tokens that carry no loss because they were older than training.mask_older_than."""
    trainable_rows: int | None = None
    """Rows with a loss token and an advantage that is not 0."""
    zero_advantage_share: float | None = None
    """Of all rows. 1: the rewards of every group were equal, or failed."""
    reward_mean: float | None = None
    """Over the rows whose reward did not fail; null also without any."""
    reward_std: float | None = None
    """Population standard deviation of the same."""
    importance_mean: float
    """Of the weights that the loss used, before truncation: of tokens, or of trajectories, by importance_level."""
    importance_max: float
    capped_share: float
    """Share of loss tokens whose importance weight was truncated."""
    clip_share: float | None = None
    """Share of loss tokens whose ratio to the proximal policy was clipped; 0 with one mini-batch. Null also without
    loss tokens."""
    kl_to_behavior: float
    """Mean of behaviour minus trainer logprob: the k1 estimate of KL(behaviour || trainer), nats."""
    kl_to_reference: float | None = None
    """Mean of the k3 estimate of KL(trainer || version 0), nats, under the weights that each mini-batch met. Null also
    without training.kl_coefficient."""
    entropy: float | None = None
    """Mean entropy of the trainer's distribution before the update, at the sampling temperature, nats."""

    @property
    def not_finite(self) -> bool:
        """A gradient was not finite: its optimizer step was skipped. Not the same as nothing to learn from."""
        return self.grad_norm is None


class TrainResult(Frozen):
    format: Literal[1] = 1
    step: int
    batch_digest: str
    weights: WeightsRef
    metrics: TrainMetrics
    training: dict[str, Any] | None = None
    """The `training` section that the step was trained under: a resumed run may have changed it, and a replay must
    not. Null in results older than that."""


def write(store: ObjectStore, keys: RunKeys, rows: Sequence[Mapping[str, Any]], result: TrainResult) -> TrainResult:
    """Commit a train step. Returns what is stored: ours, or an earlier execution's."""
    table = pa.Table.from_pylist(list(rows), schema=TRAIN_SCHEMA)
    body = encode(table, {_RESULT.decode(): result.model_dump_json()})
    store.create(keys.train_rows(result.step, result.batch_digest), body)
    found = find(store, keys, result.step, result.batch_digest)
    assert found is not None, "created or already there"
    return found


def find(store: ObjectStore, keys: RunKeys, step: int, batch_digest: str) -> TrainResult | None:
    """The committed result of training that batch at that step, or None."""
    key = keys.train_rows(step, batch_digest)
    body = store.find(key)
    if body is None:
        return None
    try:
        result = TrainResult.model_validate_json((decode(body, store.url(key)).schema.metadata or {})[_RESULT])
    except (KeyError, ValueError) as error:
        raise ObjectCorrupt(f"{store.url(key)}: not a train result: {error}") from error
    if (result.step, result.batch_digest) != (step, batch_digest):
        raise ObjectCorrupt(f"{store.url(key)}: holds step {result.step} of batch {result.batch_digest}")
    return result


def read(store: ObjectStore, keys: RunKeys, record: BatchCommit) -> pa.Table:
    """The per-row table of a trained batch. Raises ObjectMissing, ObjectCorrupt."""
    key = keys.train_rows(record.step, record.digest)
    return decode(store.get(key), store.url(key))
