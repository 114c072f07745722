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
        pa.field("importance_mean", pa.float32(), nullable=False),  # exp(trainer - behaviour), loss tokens
        pa.field("importance_max", pa.float32(), nullable=False),
        pa.field("capped_share", pa.float32(), nullable=False),  # loss tokens whose weight was truncated
        pa.field("kl_to_behavior", pa.float32(), nullable=False),  # mean of behaviour - trainer, nats
        pa.field("loss", pa.float32(), nullable=False),  # this row's share of the step's loss
    ],
    metadata={"roadstead.train_schema_version": "1"},
)


class TrainMetrics(Frozen):
    """Numbers of one optimizer step; all over loss tokens unless said otherwise."""

    loss: float
    grad_norm: float | None
    """Before clipping; null when it was not finite."""
    grad_clipped: bool
    """The norm was over training.max_grad_norm, the gradient was scaled down to it."""
    applied: bool
    """False: a non-finite gradient, the optimizer step was skipped and the weights did not move."""
    learning_rate: float
    loss_tokens: int
    importance_mean: float
    importance_max: float
    capped_share: float
    """Share of loss tokens whose importance weight was truncated."""
    kl_to_behavior: float
    """Mean of behaviour minus trainer logprob: the k1 estimate of KL(behaviour || trainer), nats."""


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
