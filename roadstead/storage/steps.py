"""Step records: the last word on a training step.

Owns: `steps/step=....json`. Never touches: what the record points at.
Invariant: written LAST, after batch, training and weights of the step are committed; created once. A step without
a record did not happen, whatever else lies in the bucket.
A crash leaves: a complete step without its record; publishing again writes the same record.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ValidationError

from roadstead.staleness import TerminalState
from roadstead.storage.batches import Frozen
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectConflict, ObjectCorrupt, ObjectStore, canonical_json
from roadstead.storage.train_rows import TrainMetrics


class StepRecord(Frozen):
    format: Literal[1] = 1
    run_id: str
    attempt: int
    step: int
    batch_digest: str
    weights_in: str
    """Weights digest of version `step`, which the batch was trained on top of."""
    weights_out: str
    """Weights digest of version `step + 1`."""
    rows: int
    response_tokens: int
    max_staleness: int
    mean_reward: float | None
    terminal: dict[str, TerminalState]
    """Groups that reached their terminal state since the previous record; each group appears in one record."""
    ledger: dict[str, Any]
    """Ledger when the batch was taken."""
    cursor: int
    """Prompts drawn from the dataset so far."""
    backlog: tuple[int, ...] = ()
    """Positions below the cursor that wait to be admitted (again) after a resume."""
    metrics: TrainMetrics


def write(store: ObjectStore, keys: RunKeys, record: StepRecord) -> StepRecord:
    """Create the record. Raises ObjectConflict when the step is recorded with another batch or other weights."""
    store.create(keys.step_record(record.step), canonical_json(record.model_dump(mode="json")))
    there = find(store, keys, record.step)
    assert there is not None, "created or already there"
    for field in ("batch_digest", "weights_in", "weights_out"):
        if getattr(there, field) != getattr(record, field):
            raise ObjectConflict(
                f"{store.url(keys.step_record(record.step))}: step {record.step} is recorded with {field} "
                f"{getattr(there, field)} (attempt {there.attempt}); refused {getattr(record, field)}"
            )
    return there


def find(store: ObjectStore, keys: RunKeys, step: int) -> StepRecord | None:
    key = keys.step_record(step)
    body = store.find(key)
    if body is None:
        return None
    try:
        return StepRecord.model_validate_json(body)
    except ValidationError as error:
        raise ObjectCorrupt(f"{store.url(key)}: not a step record: {error}") from error


def count(store: ObjectStore, keys: RunKeys) -> int:
    """How many steps are recorded, which is the policy version that a resume starts from. Reads O(log n) keys:
    a record is written only after the one before it."""
    above = 1
    while store.exists(keys.step_record(above - 1)):
        above *= 2
    below, above = above // 2, above - 1  # `below` are recorded for sure, `above` is the most that can be
    while below < above:
        middle = (below + above + 1) // 2
        if store.exists(keys.step_record(middle - 1)):
            below = middle
        else:
            above = middle - 1
    return below


def all_of(store: ObjectStore, keys: RunKeys) -> list[StepRecord]:
    """Records of steps 0, 1, ... up to the first that is missing."""
    records: list[StepRecord] = []
    while (record := find(store, keys, len(records))) is not None:
        records.append(record)
    return records
