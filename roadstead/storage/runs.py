"""Run and attempt records: what a run is, and each time it was begun.

Owns: `run.json` and `attempts/*.json`. Never touches: steps, batches.
Invariant: a run's record never changes; a run id that exists with another configuration is refused.
A crash leaves: a run record without an attempt, which the next start completes.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ValidationError

from roadstead.storage.batches import Frozen
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectConflict, ObjectCorrupt, ObjectStore, Put, canonical_json


class RunRecord(Frozen):
    format: Literal[1] = 1
    run_id: str
    config: dict[str, Any]
    """The run's configuration, secrets removed."""
    versions: dict[str, str]
    """Component name to version: engine and trainer are one unit."""
    model_digest: str
    dataset_digest: str
    dataset_rows: int
    created_at: str
    """UTC, ISO 8601."""


class AttemptRecord(Frozen):
    format: Literal[1] = 1
    run_id: str
    attempt: int
    reason: str
    from_version: int
    fencing_token: str
    started_at: str


def create(store: ObjectStore, keys: RunKeys, record: RunRecord) -> RunRecord:
    """Create the run, or return it when it exists with the same configuration, model and dataset."""
    if store.create(keys.run, canonical_json(record.model_dump(mode="json"))) is Put.CREATED:
        return record
    there = read(store, keys)
    for field in ("config", "model_digest", "dataset_digest"):
        mine, theirs = getattr(record, field), getattr(there, field)
        if mine != theirs:
            raise ObjectConflict(
                f"run {keys.run_id!r} exists with another {field} (created {there.created_at}): "
                f"{_first_difference(theirs, mine)}; choose another name, or run it with its own configuration"
            )
    return there


def read(store: ObjectStore, keys: RunKeys) -> RunRecord:
    """Raises ObjectMissing when there is no such run."""
    try:
        return RunRecord.model_validate_json(store.get(keys.run))
    except ValidationError as error:
        raise ObjectCorrupt(f"{store.url(keys.run)}: not a run record: {error}") from error


def open_attempt(store: ObjectStore, keys: RunKeys, record: AttemptRecord) -> AttemptRecord:
    """Record a start. Raises ObjectConflict when the attempt number is taken."""
    store.put_once(keys.attempt(record.attempt), canonical_json(record.model_dump(mode="json")))
    return record


def last_attempt(store: ObjectStore, keys: RunKeys) -> int:
    """Highest attempt number on record; 0 when the run never began."""
    attempt = 0
    while store.exists(keys.attempt(attempt + 1)):
        attempt += 1
    return attempt


def _first_difference(theirs: Any, mine: Any, path: str = "") -> str:
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for key in sorted({*theirs, *mine}):
            if theirs.get(key) != mine.get(key):
                return _first_difference(theirs.get(key), mine.get(key), f"{path}.{key}" if path else key)
    return f"{path or 'it'} was {theirs!r}, is {mine!r} now"
